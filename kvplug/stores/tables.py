"""Which pages the rows of a batch are made of, how they are read, and which must be copied before they are written.

Tables lie on the host: a step that stays within its pages reads none of them, and one that does not works on whole rows
at once.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvplug.stores.arena import Arena, Holder
from kvplug.stores.contiguous import ordinary_tensors
from kvplug.view import Sharing

# Slots side by side from which on they are read where they lie; fewer are gathered together with their neighbours.
FEW_SLOTS = 256


@dataclass(frozen=True)
class Want:
    """What a forward is about to write: the slots `first : slots` of each of `rows` rows."""

    table: Table
    rows: int
    first: int
    slots: int


@dataclass(frozen=True)
class Run:
    """Slots `start : stop` of all rows, as attention reads them.

    There are `rows` to be read. Either the first one starts with page `base` and the others lie `stride` pages apart,
    or `index` has the slots of the arena to be gathered, `[rows * (stop - start)]`. `sharing` tells which row of the
    batch reads which of them, None where each reads its own.
    """

    start: int
    stop: int
    rows: int
    base: int = 0
    stride: int = 0
    index: torch.Tensor | None = None
    sharing: Sharing | None = None


class Table(Holder):
    """The pages of a batch of rows: slot s of row r lies in page `pages[r, s // page_size]`.

    The layers of a cache that keep equally many tokens share one. Each calls its methods in turn, and the first of them
    in a step does what there is to do. A copy of a table holds the same pages, and so does a row that is there twice:
    a page is copied when it is written to and somebody else holds it.

    Attributes:
        pages: int64 `[rows, pages]` on the host; None before the first token.
        lengths: slots in use in each layer, by its index.
        turn: how often the rows were changed.
    """

    def __init__(self, arena: Arena):
        self.arena = arena
        self.pages: torch.Tensor | None = None
        self.lengths: dict[int, int] = {}
        self.turn = 0
        self._changed()
        arena.holders.add(self)

    def _changed(self) -> None:
        # Slots that may be written without asking, and what was worked out of the pages.
        self.writable = (0, 0)
        self._known: dict[tuple, object] = {}

    @ordinary_tensors
    def __deepcopy__(self, memo: dict) -> Table:
        copied = Table(self.arena)
        memo[id(self)] = copied
        copied.lengths, copied.turn = dict(self.lengths), self.turn
        if self.pages is not None:
            copied.pages = self.pages.clone()
            self.arena.hold(copied.pages)
        self.writable = (0, 0)
        return copied

    def __getstate__(self) -> dict:
        return vars(self) | {"writable": (0, 0), "_known": {}}

    @ordinary_tensors
    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.arena.holders.add(self)
        if self.pages is not None:
            self.arena.hold(self.pages)

    def __del__(self) -> None:
        if getattr(self, "pages", None) is not None and not sys.is_finalizing():
            self.arena.release(self.pages)

    def __repr__(self) -> str:
        return f"Table({'no' if self.pages is None else tuple(self.pages.shape)} pages)"

    @property
    def holds(self) -> bool:
        return self.columns > 0

    def held_pages(self) -> Iterable[int]:
        return [] if self.pages is None else self.pages.flatten().tolist()

    def rename(self, names: torch.Tensor) -> None:
        if self.pages is not None:
            self.pages = names[self.pages]
        self._known = {}

    @property
    def page_size(self) -> int:
        return self.arena.page_size

    @property
    def columns(self) -> int:
        """Pages of a row."""
        return 0 if self.pages is None else self.pages.shape[1]

    def columns_for(self, slots: int) -> int:
        return -(-slots // self.page_size)

    # Writing

    def may_write(self, first: int, slots: int) -> bool:
        """Whether the slots `first : slots` have pages that nobody else holds, as far as was asked before."""
        return self.writable[0] <= first and slots <= self.writable[1]

    def _copies(self, first: int) -> torch.Tensor:
        """Which pages from that of slot `first` on somebody else holds, bool `[rows, columns]`; of the rows of this
        table that share one, the first may keep it."""
        block = self.pages[:, first // self.page_size :]
        flat = block.flatten()
        if not flat.numel() or int(self.arena.refs[flat].max()) == 1:
            return torch.zeros_like(block, dtype=torch.bool)
        pages, which, counts = flat.unique(return_inverse=True, return_counts=True)
        number = torch.arange(len(flat))
        earliest = torch.full((len(pages),), len(flat)).scatter_reduce(0, which, number, "amin")
        others = self.arena.refs[flat] > counts[which]
        return (others | (number != earliest[which])).view_as(block)

    def lacks(self, want: Want) -> int:
        """New pages that it takes to write what is wanted."""
        more = max(self.columns_for(want.slots) - self.columns, 0) * want.rows
        return more if self.pages is None else more + int(self._copies(want.first).sum())

    @ordinary_tensors
    def serve(self, want: Want) -> None:
        """Takes the pages that are lacking; the arena has them."""
        if self.pages is None:
            self.pages = torch.zeros(want.rows, 0, dtype=torch.int64)
        mine = self._copies(want.first)
        if mine.any():
            block = self.pages[:, want.first // self.page_size :]
            source = block[mine]
            target = self.arena.take(len(source))
            self.arena.copy(source, target)
            block[mine] = target
            self.arena.release(source)
        more = self.columns_for(want.slots) - self.columns
        if more > 0:
            rows = len(self.pages)
            after = int(self.pages[-1, -1]) if rows == 1 and self.columns else -1
            taken = self.arena.take(rows * more, after)
            self.pages = torch.cat([self.pages, taken.view(rows, more)], dim=1)
        self._changed()
        start = want.first // self.page_size * self.page_size
        self.writable = (start, self.columns * self.page_size)

    @ordinary_tensors
    def slots(self, start: int, stop: int, device: torch.device) -> int | torch.Tensor:
        """Where the slots `start : stop` of all rows lie in the arena: the first of them where all lie side by side, in
        order of rows, else all, int64 `[rows * (stop - start)]`."""
        key = ("slots", start, stop, device)
        if key not in self._known:
            self._forget("slots")
            index = self._index(self.pages, start, stop)
            first = int(index[0]) if len(index) else 0
            beside = bool((index == torch.arange(first, first + len(index))).all())
            self._known[key] = first if beside else index.to(device, non_blocking=True)
        return self._known[key]

    def _forget(self, kind: str) -> None:
        self._known = {key: value for key, value in self._known.items() if key[0] != kind}

    def _index(self, pages: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        slot = torch.arange(start, stop)
        return (pages[:, slot // self.page_size] * self.page_size + slot % self.page_size).flatten()

    @ordinary_tensors
    def located(self, slots: torch.Tensor) -> torch.Tensor:
        """Where slots `[rows or 1, heads, n]` of each row lie in the arena: `[rows, heads, n]`."""
        key = ("table", slots.device)
        if key not in self._known:
            self._known[key] = self.pages.to(slots.device, non_blocking=True)
        pages = self._known[key]
        slots = slots.expand(len(pages), *slots.shape[1:])
        page = pages.gather(1, (slots // self.page_size).flatten(1)).view_as(slots)
        return page * self.page_size + slots % self.page_size

    # Reading

    @ordinary_tensors
    def runs(self, length: int, device: torch.device, whole: bool = False) -> list[Run]:
        """How the first `length` slots of all rows are read, `whole` in one run."""
        key = ("runs", length, device, whole)
        if key not in self._known:
            self._forget("runs")
            self._known[key] = self._find_runs(length, device, whole)
        return self._known[key]

    def _find_runs(self, length: int, device: torch.device, whole: bool) -> list[Run]:
        columns = self.columns_for(length)
        pages = self.pages[:, :columns]
        broken = (pages[:, 1:] - pages[:, :-1] != 1).any(0)
        cuts = [0, *(broken.nonzero()[:, 0] + 1).tolist(), columns]
        parts = list(itertools.pairwise(cuts))
        regular = [self._regular(pages[:, start]) for start, _ in parts]
        if len(parts) == 1 and regular[0] is not None and (not whole or regular[0][2] is None):
            return [self._run(0, length, regular[0], device)]
        if whole:
            return [self._gathered(pages, 0, length, device)]
        runs: list[Run] = []
        waiting: list[int] = []
        for (start, stop), found in zip(parts, regular, strict=True):
            first, last = start * self.page_size, min(stop * self.page_size, length)
            if found is None or last - first < FEW_SLOTS:
                waiting = [waiting[0] if waiting else first, last]
                continue
            if waiting:
                runs.append(self._gathered(pages, *waiting, device))
                waiting = []
            runs.append(self._run(first, last, found, device))
        if waiting:
            runs.append(self._gathered(pages, *waiting, device))
        return runs

    def _regular(self, firsts: torch.Tensor) -> tuple[int, int, torch.Tensor | None, int] | None:
        """Of the first page of each row: the lowest one, the distance between them, which of the different ones each
        row reads (None where each row reads its own, in order), and their number; None where they lie irregularly."""
        unique, which = firsts.unique(sorted=True, return_inverse=True)
        steps = unique[1:] - unique[:-1]
        if len(steps) and bool((steps != steps[0]).any()):
            return None
        own = len(unique) == len(firsts) and bool((unique == firsts).all())
        return int(unique[0]), int(steps[0]) if len(steps) else 0, None if own else which, len(unique)

    def _run(self, start: int, stop: int, found: tuple, device: torch.device) -> Run:
        base, stride, which, rows = found
        sharing = None if which is None else Sharing.of(which, rows, device)
        return Run(start, stop, rows, base, stride, sharing=sharing)

    def _gathered(self, pages: torch.Tensor, start: int, stop: int, device: torch.device) -> Run:
        index = self._index(pages, start, stop)
        return Run(start, stop, len(pages), index=index.to(device, non_blocking=True))

    # Changes of rows and lengths

    @ordinary_tensors
    def trim(self) -> None:
        """Gives back the pages past the slots that any layer uses."""
        if self.pages is None:
            return
        columns = self.columns_for(max(self.lengths.values(), default=0))
        if columns < self.columns:
            gone, self.pages = self.pages[:, columns:], self.pages[:, :columns].clone()
            if columns == 0:
                self.pages = None
            self._changed()
            self.arena.release(gone)

    @ordinary_tensors
    def select(self, rows: torch.Tensor, turn: int) -> None:
        """Keeps the rows `rows`, on any device, as the change of number `turn`; done once for all layers."""
        if turn <= self.turn:
            return
        self.turn = turn
        if self.pages is not None:
            gone, self.pages = self.pages, self.pages[rows.cpu()]
            self._changed()
            self.arena.hold(self.pages)
            self.arena.release(gone)
