"""The first and the last tokens in the model's dtype, those between them encoded in whole groups.

What is encoded never changes but by a crop. A step writes its own token in place; only a flush moves anything else, and
no more than the bounded tail. What is held follows from the number of tokens alone, not from how they came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kvplug.codecs import Codec, Plain
from kvplug.stores.base import Held, State, Store, expect, part_of, prefixed
from kvplug.stores.contiguous import ContiguousStore, Side, grown, ordinary_tensors
from kvplug.view import Segment

# Tokens that a flush encodes at once where the codec has no groups: encoding costs a handful of operations, whatever
# the number of tokens.
FLUSH = 16
# Tokens of the last forward that can be taken back as if they had never been, for which what was flushed is kept in
# full precision until the next forward.
UNDO = 8
# The tail's buffer grows by so many tokens until it is as large as it gets.
TAIL_SLAB = 32

# `residual` and `sinks` where tokens are not written one by one in 8 bits or more, and nobody chose.
RESIDUAL = (32, 4)

PLAIN = Plain()


def group_of(keys: Codec, values: Codec) -> int:
    """Tokens that are flushed together: the larger of both granules, or `FLUSH` where there are no groups.

    Raises:
        ValueError: one granule does not divide the other; names both.
    """
    group, least = max(keys.granule, values.granule), min(keys.granule, values.granule)
    if group % least:
        raise ValueError(
            f"keys={keys.name!r} has groups of {keys.granule} tokens and values={values.name!r} of {values.granule}; "
            "groups of which one divides the other are accepted"
        )
    return group if group > 1 else FLUSH


def defaults(keys: Codec, values: Codec) -> tuple[int, int]:
    """`residual` and `sinks` where nobody chose: none for 8 bits and more token by token, else 32 and 4."""
    return (0, 0) if all(c.granule == 1 and c.bits >= 8 for c in (keys, values)) else RESIDUAL


class ResidualStore(Store):
    """Tokens [0, sinks) and [settled, length) as they came in, [sinks, settled) encoded in whole groups.

    Settled are the tokens `settled_at(length)`. The dense buffers hold the sinks and right after them the tail:
    token t ≥ sinks lies at slot `sinks + t - first`. After a flush the tail still begins with tokens that are
    encoded by then (`first < settled`), which is what a crop falls back on; the next forward moves them out.

    Args:
        keys, values: the codec of each side.
        residual: least number of last tokens that stay as they are.
        sinks: number of first tokens that stay as they are.
        encoded: where encoded tokens go, an empty store of these codecs; None for one of its own.
    """

    positions = None

    def __init__(self, keys: Codec, values: Codec, residual: int, sinks: int, encoded: Store | None = None):
        self.codecs = (keys, values)
        self.residual, self.sinks = residual, sinks
        self.group = group_of(keys, values)
        self.encoded = ContiguousStore(keys, values) if encoded is None else encoded
        self.dense: list[torch.Tensor] = []
        self.length = 0
        self.settled = self.first = sinks

    @property
    def keys(self) -> Side:
        return self.encoded.keys

    @property
    def values(self) -> Side:
        return self.encoded.values

    @property
    def basis_bytes(self) -> int:
        return self.encoded.basis_bytes

    @property
    def room(self) -> int:
        """Tokens that the tail holds at most: those that wait for their group, and those of a short forward."""
        return self.residual + self.group + UNDO

    def settled_at(self, length: int) -> int:
        """How many of `length` tokens are sinks or encoded."""
        return self.sinks + self.group * (max(length - self.residual - self.sinks, 0) // self.group)

    @ordinary_tensors
    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.encoded.allocate(keys, values)
        self.dense = [x.new_zeros(*x.shape[:2], 0, x.shape[-1]) for x in (keys, values)]

    @ordinary_tensors
    def _reserve(self, length: int) -> None:
        """Room in the dense buffers for what is kept of `length` tokens: slab by slab, up to all there can be."""
        capacity = min(-(-length // TAIL_SLAB) * TAIL_SLAB, self.sinks + self.room)
        held = self.dense[0].shape[2]
        if held < capacity:
            self.dense = [grown(x, held, capacity) for x in self.dense]

    def _slots(self, start: int, stop: int) -> list[torch.Tensor]:
        """Views of the dense tokens `start : stop`, which lie side by side."""
        slot = start if start < self.sinks else self.sinks + start - self.first
        return [x.narrow(2, slot, stop - start) for x in self.dense]

    def _write(self, start: int, *sides: torch.Tensor) -> None:
        """Writes tokens from `start` on to their slots."""
        if sides[0].shape[2]:
            for slots, x in zip(self._slots(start, start + sides[0].shape[2]), sides, strict=True):
                slots.copy_(x)

    def _compact(self) -> None:
        """Moves the tail down over tokens that are encoded."""
        if self.first == self.settled:
            return
        if self.length > self.settled:
            tail = [x.clone() for x in self._slots(self.settled, self.length)]
            self.first = self.settled
            self._write(self.settled, *tail)
        self.first = self.settled

    def place(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Writes the tokens of a forward in place, before attention, if there is room; `settle` then does the rest."""
        tokens = keys.shape[2]
        self._compact()
        if self.length + tokens - self.first > self.room:
            return False
        self._reserve(self.length + tokens)
        self._write(self.length, keys, values)
        self.length += tokens
        return True

    def take_back(self, tokens: int) -> list[torch.Tensor]:
        """Takes the last tokens, which are not settled, out again."""
        start = self.length - tokens
        taken = [x.clone() for x in self._slots(start, self.length)]
        self.length = start
        return taken

    def settle(self) -> None:
        """Encodes the groups that have left the residual."""
        target = self.settled_at(self.length)
        if target > self.settled:
            self._flush(self._slots(self.settled, target), target)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Adds tokens that were not placed, after those that are there, and settles."""
        new, before = (keys, values), self.length
        length = before + keys.shape[2]
        target = self.settled_at(length)

        def fresh(start: int, stop: int) -> list[torch.Tensor]:
            return [x[:, :, start - before : stop - before] for x in new]

        if target > self.settled and self.settled < before:
            # The group that began before these tokens is made whole; the others are encoded where they are.
            middle = min(self.settled + -(-(before - self.settled) // self.group) * self.group, target)
            tokens = self._slots(self.settled, min(before, middle))
            if middle > before:
                tokens = [torch.cat(pair, dim=2) for pair in zip(tokens, fresh(before, middle), strict=True)]
            self._flush(tokens, middle)
        if target > self.settled:
            self._flush(fresh(self.settled, target), target)
        self._keep_tail(length, fresh)
        self.length = length

    def _keep_tail(self, length: int, fresh: Callable[[int, int], list[torch.Tensor]]) -> None:
        """Fills the dense buffers, once `length` tokens are there, from what they hold and from the new tokens."""
        before = self.length
        self._reserve(length)
        if before < self.sinks:
            self._write(before, *fresh(before, min(self.sinks, length)))
        if length <= self.sinks:
            return
        start = max(self.first, length - self.room)
        if self.first < start < before:
            kept = [x.clone() for x in self._slots(start, before)]
            self.first = start
            self._write(start, *kept)
        self.first = start
        start = max(start, before)
        self._write(start, *fresh(start, length))

    def _flush(self, tokens: list[torch.Tensor], settled: int) -> None:
        self.encoded.append(*tokens)
        self.settled = settled

    @property
    def kept_plain(self) -> bool:
        """As of the `ContiguousStore`."""
        return self.encoded.kept_plain

    def segments(self) -> list[Segment]:
        """What is held: the encoded tokens, and in one piece the sinks and the tail."""
        found = []
        if self.settled > self.sinks:
            found.append(Segment(*self.encoded.view(0, self.encoded.length), start=self.sinks))
        sinks = min(self.sinks, self.length)
        slots = sinks + max(self.length - self.settled, 0)
        if not slots:
            return found
        dense = [x[:, :, :slots] for x in self.dense]
        if self.first < self.settled:
            # The tail still begins with tokens that a crop may want back.
            tails = self._slots(self.settled, max(self.length, self.settled))
            dense = [torch.cat([x[:, :, :sinks], tail], dim=2) for x, tail in zip(self.dense, tails, strict=True)]
        found.append(Segment(*(PLAIN.encode(x) for x in dense), start=self.settled, sinks=sinks))
        return found

    def truncate(self, length: int) -> None:
        """Keeps the first `length` tokens.

        As if the others had never been, if what they flushed is still there (see `UNDO`). Else groups that are whole
        stay as they are, and what remains of a cut one is decoded into the tail.
        """
        settled = self.settled_at(length)
        if settled >= self.first:
            self.settled = min(self.settled, settled)
        elif length < self.settled:
            whole = self.sinks + self.group * (max(length - self.sinks, 0) // self.group)
            self.settled = self.first = whole
            if length > whole:
                cut = self.encoded.view(whole - self.sinks, length - whole)
                self._write(whole, *(x.decode(dense.dtype) for x, dense in zip(cut, self.dense, strict=True)))
        self.encoded.truncate(self.settled - self.sinks)
        self.length = length

    @ordinary_tensors
    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.dense = [change(x) for x in self.dense]

    def select(self, rows: torch.Tensor) -> None:
        self._map(lambda x: x.index_select(0, rows.to(x.device)))
        self.encoded.select(rows)

    def repeat(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))
        self.encoded.repeat(repeats)

    def to(self, device: torch.device | str) -> None:
        self._map(lambda x: x.to(device, non_blocking=True))
        self.encoded.to(device)

    def reset(self) -> None:
        self.encoded.reset()
        self.__init__(*self.codecs, self.residual, self.sinks, self.encoded)

    @property
    def _in_use(self) -> int:
        """Dense slots that a later step may read: sinks and tail, and before it what a crop falls back on."""
        return min(self.length, self.sinks) + max(self.length - self.first, 0)

    def state(self) -> State:
        tensors, plain = prefixed("encoded", self.encoded.state())
        for name, x in zip(("keys", "values"), self.dense, strict=True):
            tensors[f"dense.{name}"] = x[:, :, : self._in_use]
        return tensors, {**plain, "length": self.length, "settled": self.settled, "first": self.first}

    @ordinary_tensors
    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        plain = state[1]
        self.allocate(keys, values)
        self.encoded.load_state(part_of(state, "encoded"), keys, values)
        self.length, self.settled, self.first = (plain[name] for name in ("length", "settled", "first"))
        self._reserve(self.length)
        self._load_dense(state[0])

    def _load_dense(self, tensors: dict[str, torch.Tensor]) -> None:
        """Fills the dense buffers, which have room."""
        for name, x in zip(("dense.keys", "dense.values"), self.dense, strict=True):
            shape = (*x.shape[:2], self._in_use, x.shape[3])
            x[:, :, : self._in_use] = expect(name, tensors[name], shape, x.dtype)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.dense
        yield from self.encoded.tensors()

    def held(self) -> Held:
        encoded = self.encoded.held()
        dense = sum(x.numel() * x.itemsize for x in self.dense)
        tokens = min(self.length, self.sinks) + max(self.length - self.settled, 0)
        used = sum(x[:, :, :tokens].numel() * x.itemsize for x in self.dense)
        return replace(encoded, residual=used, spare=encoded.spare + dense - used)
