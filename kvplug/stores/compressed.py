"""What was kept of a context, in slots that heads share, and behind it all tokens that came later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import torch

from kvplug.codecs import Codec, Encoded
from kvplug.stores.base import Held, State, Store, part_of, prefixed
from kvplug.stores.contiguous import ContiguousStore
from kvplug.stores.heads import HeadStore
from kvplug.view import Segment


class CompressedStore(Store):
    """`context` never changes; `length` counts the tokens of the context, `first`, and those in `later`."""

    def __init__(self, keys: Codec, values: Codec, context: HeadStore, first: int):
        self.context, self.first = context, first
        self.later = ContiguousStore(keys, values)

    positions = None

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        return self.later.codecs

    @property
    def keys(self):
        return self.later.keys

    @property
    def values(self):
        return self.later.values

    @property
    def length(self) -> int:
        return self.first + self.later.length

    @property
    def kept_plain(self) -> bool:
        return self.context.kept_plain or self.later.kept_plain

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.later.allocate(keys, values)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.later.append(keys, values)

    def view(self, start: int, length: int) -> tuple[Encoded, Encoded]:
        """Keys and values of later tokens, `start` counted with those of the context."""
        return self.later.view(start - self.first, length)

    def segments(self) -> list[Segment]:
        context = self.context
        found = [Segment(*context.view(0, context.length), positions=context.positions, owners=context.owners)]
        if self.later.length:
            found.append(Segment(*self.later.view(0, self.later.length), start=self.first))
        return found

    def truncate(self, length: int) -> None:
        self.later.truncate(length - self.first)

    def select(self, rows: torch.Tensor) -> None:
        self.context.select(rows)
        self.later.select(rows)

    def repeat(self, repeats: int) -> None:
        self.context.repeat(repeats)
        self.later.repeat(repeats)

    def to(self, device: torch.device | str) -> None:
        self.context.to(device)
        self.later.to(device)

    def reset(self) -> None:
        """Holds what is kept of the context, for one row, and nothing else."""
        self.context.select(torch.zeros(1, dtype=torch.long))
        self.later.reset()

    def state(self) -> State:
        (tensors, context), (others, later) = (prefixed(n, getattr(self, n).state()) for n in ("context", "later"))
        return {**tensors, **others}, {**context, **later, "first": self.first}

    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.first = state[1]["first"]
        self.context.load_state(part_of(state, "context"), keys, values)
        self.later.load_state(part_of(state, "later"), keys, values)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.context.tensors()
        yield from self.later.tensors()

    def held(self) -> Held:
        one, other = self.context.held(), self.later.held()
        return Held(**{f.name: getattr(one, f.name) + getattr(other, f.name) for f in fields(Held)})
