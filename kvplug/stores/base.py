"""Where encoded blocks live: the protocol of a store for one layer's keys and values.

A store never decides what stays and never decodes; it moves bytes, whatever the codec's fields are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvplug.codecs import Encoded
from kvplug.view import Sharing


@dataclass(frozen=True)
class Held:
    """Bytes that a store holds: what is used, by kind, and what is spare capacity."""

    keys: int = 0
    values: int = 0
    scales: int = 0
    residual: int = 0
    tables: int = 0
    scores: int = 0
    spare: int = 0


@dataclass(frozen=True)
class Part:
    """Keys and values of all slots from `start` up to the next part; of fewer rows than the batch where rows share them
    as `sharing` tells."""

    start: int
    keys: Encoded
    values: Encoded
    sharing: Sharing | None = None


class Store:
    """Holds the encoded keys and values of one layer, and where slots are reused the position of each.

    `length` counts the slots in use, `positions` is `[rows, kv_heads or 1, length]` or None where slot i holds token i.
    """

    length: int
    positions: torch.Tensor | None

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes shapes, dtype and device from a first block `[batch, kv_heads, any, head_dim]`; holds nothing yet."""
        raise NotImplementedError

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Encodes and adds tokens after those that are there."""
        raise NotImplementedError

    def view(self, start: int, length: int) -> tuple[Encoded, Encoded]:
        """Keys and values of the slots `start : start + length`, not copied."""
        raise NotImplementedError

    def parts(self) -> list[Part]:
        """All slots in use, as attention reads them."""
        raise NotImplementedError

    def truncate(self, length: int) -> None:
        """Keeps the first `length` slots."""
        raise NotImplementedError

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the rows `rows` of the batch, in that order; a row may come several times."""
        raise NotImplementedError

    def repeat(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> None:
        """Moves everything to `device`, not waiting where the copy can be asynchronous."""
        raise NotImplementedError

    def reset(self) -> None:
        """Holds nothing, and forgets shapes."""
        raise NotImplementedError

    def tensors(self) -> Iterator[torch.Tensor]:
        """Everything that is held."""
        raise NotImplementedError

    def held(self) -> Held:
        """Exact bytes."""
        raise NotImplementedError
