"""Where encoded blocks live: the protocol of a store for one layer's keys and values.

A store never decides what stays and never decodes; it moves bytes, whatever the codec's fields are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvplug.codecs import Encoded
from kvplug.view import Sharing

# Tensors by name, and beside them what JSON can hold.
State = tuple[dict[str, torch.Tensor], dict[str, object]]


def prefixed(name: str, state: State) -> State:
    """The state of a part, as a part of a larger one."""
    tensors, plain = state
    return {f"{name}.{key}": x for key, x in tensors.items()}, {name: plain}


def part_of(state: State, name: str) -> State:
    """The inverse of `prefixed`."""
    tensors, plain = state
    start = f"{name}."
    return {key.removeprefix(start): x for key, x in tensors.items() if key.startswith(start)}, plain[name]


def copied(tensors: dict[str, torch.Tensor], name: str, device: torch.device) -> torch.Tensor | None:
    """The tensor `name` of a state on `device`, in memory of its own; None where there is none."""
    return tensors[name].to(device, copy=True) if name in tensors else None


def expect(name: str, x: torch.Tensor, shape: tuple[int | None, ...], dtype: torch.dtype) -> torch.Tensor:
    """The tensor `name` of a state, if it is what it has to be; None in `shape` stands for any number.

    Raises:
        ValueError: its shape or dtype is another.
    """
    fits = len(x.shape) == len(shape) and all(b in (None, a) for a, b in zip(x.shape, shape, strict=True))
    if not fits or x.dtype != dtype:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(
            f"the state's {name!r} is {x.dtype} of shape {tuple(x.shape)}; {dtype} of shape ({wanted}) is accepted"
        )
    return x


def dtype_named(name: str) -> torch.dtype:
    """torch's dtype of a name.

    Raises:
        ValueError: there is none.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype={name!r} is not known; the name of one of torch's is accepted")
    return found


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
    # Of what the codecs know of the model, which is held without any token too.
    basis_bytes = 0

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

    def state(self) -> State:
        """What is held without spare capacity, and what else later steps depend on. Views: nothing is copied."""
        raise NotImplementedError

    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Holds a copy of what `state` of a store that was made alike gave, on the device of `keys`.

        Args:
            keys, values: `[batch, kv_heads, 0, head_dim]`, as for `allocate`.

        Raises:
            ValueError: a tensor does not fit.
        """
        raise NotImplementedError
