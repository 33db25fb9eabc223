"""Encoded tokens of several layers in one store, over the heads of all of them side by side.

Each layer has a `Member`, a store like any other, to give its tokens to and to read its part from. What is given waits
until the last layer has given the same tokens: nothing may be read in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kvplug.codecs import Codec, Encoded
from kvplug.codecs.joint import JointCodec, part_of
from kvplug.stores.base import Held, State, Store
from kvplug.stores.contiguous import ContiguousStore, Side


class JointStore:
    """What the members share.

    Args:
        keys, values: the codec of each side, over the heads of all members.
        members: how many layers.
    """

    def __init__(self, keys: Codec, values: Codec, members: int):
        self.members, self.codecs = members, (keys, values)
        self.store = ContiguousStore(keys, values)
        self._wait()

    def _wait(self) -> None:
        # Blocks of keys and values of each member, in order, that some other one has not given yet.
        self._given: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(self.members)]

    def member(self, index: int) -> Member:
        return Member(self, index)

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        codecs = [codec.to(keys.device) if isinstance(codec, JointCodec) else codec for codec in self.codecs]
        self.store = ContiguousStore(*codecs)
        self.store.allocate(*(self.wide(x) for x in (keys, values)))

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """No tokens, with the heads of all members."""
        return x.new_empty(x.shape[0], x.shape[1] * self.members, 0, x.shape[-1])

    def reset(self) -> None:
        self.store = ContiguousStore(*self.codecs)
        self._wait()

    def give(
        self, member: int, keys: torch.Tensor, values: torch.Tensor, length: int, write: Callable[..., None]
    ) -> None:
        """Takes a block of tokens of a member; once all members gave theirs `write` is called with all, side by side,
        when the store has `length` slots in use."""
        self._given[member].append((keys, values))
        if all(self._given):
            given = [blocks.pop(0) for blocks in self._given]
            self.store.length = length
            write(*(torch.cat(side, dim=1) for side in zip(*given, strict=True)))

    def bases(self) -> dict[str, torch.Tensor]:
        """By side, what a codec knows of the model and has in memory of its own."""
        sides = zip(("keys", "values"), self.store.codecs, strict=True)
        return {name: codec.basis for name, codec in sides if hasattr(codec, "basis")}


class Member(Store):
    """The store of one layer of a `JointStore`. All members get the same calls, in order."""

    positions = None

    def __init__(self, joint: JointStore, index: int):
        self.joint, self.index = joint, index
        self.length = 0

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def keys(self) -> Side:
        return self.joint.store.keys

    @property
    def values(self) -> Side:
        return self.joint.store.values

    @property
    def capacity(self) -> int:
        return self.joint.store.capacity

    @property
    def kept_plain(self) -> bool:
        return self.joint.store.kept_plain

    @property
    def device(self) -> torch.device | None:
        """Where the tokens of all members are, None before there are any."""
        return next((x.device for x in self.joint.store.tensors()), None)

    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.length = 0
        if self.first:
            self.joint.allocate(keys, values)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.joint.give(self.index, keys, values, self.length, self.joint.store.append)
        self.length += keys.shape[2]

    def append_rows(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """As `ContiguousStore.append_rows`; every member has the same places."""

        def write(*both: torch.Tensor) -> None:
            self.joint.store.append_rows(*both, rows, places)

        self.joint.give(self.index, keys, values, self.length, write)
        self.length = max(self.length, int(places.sum(-1).max()))

    def view(self, start: int, length: int) -> tuple[Encoded, Encoded]:
        keys, values = self.joint.store.view(start, length)
        return tuple(part_of(side, self.index, self.joint.members) for side in (keys, values))

    def truncate(self, length: int) -> None:
        # Nothing is moved: the other members still read what lies behind.
        self.length = length

    def select(self, rows: torch.Tensor) -> None:
        if self.first:
            self.joint.store.select(rows)

    def repeat(self, repeats: int) -> None:
        if self.first:
            self.joint.store.repeat(repeats)

    def to(self, device: torch.device | str) -> None:
        self.joint.store.to(device)

    def reset(self) -> None:
        self.length = 0
        self.joint.reset()

    def tensors(self) -> Iterator[torch.Tensor]:
        if self.first:
            yield from self.joint.store.tensors()

    @property
    def basis_bytes(self) -> int:
        """Of what the codecs know, which is counted with the first member too."""
        return sum(x.untyped_storage().nbytes() for x in self.joint.bases().values()) if self.first else 0

    def held(self) -> Held:
        """All that the members share is counted with the first one."""
        if not self.first:
            return Held()
        found = self.joint.store._held(self.length, self.joint.store.capacity)
        return replace(found, tables=found.tables + self.basis_bytes)

    def state(self) -> State:
        if not self.first:
            return {}, {"length": self.length}
        self.joint.store.length = self.length
        return self.joint.store.state()

    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.length = state[1]["length"]
        if self.first:
            self.joint.store.load_state(state, *(self.joint.wide(x) for x in (keys, values)))
