"""A pool of pages: one arena for all layers that keep equally many tokens, and a bound on all of them together.

Pages are numbers here; a `PagedStore` puts keys and values into them. A page covers the same tokens in all layers that
keep equally many, so these share one table.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping

import torch

from kvplug.stores.arena import Arena
from kvplug.stores.contiguous import ordinary_tensors
from kvplug.stores.tables import Table, Want

# Tokens of a page where nobody says.
PAGE_SIZE = 16
# Pages that an arena grows by at least.
LEAST = 4


class OutOfPages(RuntimeError):
    """A bounded pool has no room for the tokens of a forward. Nothing was changed."""


def capacity_for(pages: int) -> int:
    """Pages that an arena has room for when `pages` are held, a function of the number alone, so that it can be
    planned: at most 3 more, or 1/32 of them where that is more."""
    slab = max(LEAST, 1 << max(pages // 32, 1).bit_length() - 1)
    return -(-pages // slab) * slab


class Pages:
    """The arenas of a pool, one for all layers that keep equally many tokens, and how much they may hold together.

    Args:
        page_size: tokens of a page.
        max_bytes: most bytes of all buffers, None for any number.
        token_bytes: bytes of a token in each layer, by its index in the model: what a page will take before any is.
    """

    def __init__(
        self, page_size: int = PAGE_SIZE, max_bytes: int | None = None, token_bytes: Mapping[int, int] | None = None
    ):
        if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
            raise ValueError(f"page_size={page_size!r} is not valid; a whole number of at least 1 is accepted")
        self.page_size, self.max_bytes = page_size, max_bytes
        self.token_bytes = dict(token_bytes or {})
        self.arenas: dict[object, Arena] = {}

    def __deepcopy__(self, memo: dict) -> Pages:
        return self

    def table(self, kind: object) -> Table:
        """An empty table for layers that keep equally many tokens; those of one `kind` are in one arena."""
        return Table(self.arena(kind))

    def arena(self, kind: object) -> Arena:
        return self.arenas.setdefault(kind, Arena(self.page_size))

    def page_bytes(self, arena: Arena) -> int:
        """Bytes of a page in all layers."""
        return self.page_size * sum(arena.token_bytes(i) or self.token_bytes.get(i, 0) for i in arena.sides)

    def _used(self, more: Mapping[Arena, int]) -> int:
        """Bytes that the buffers take once `more` pages are held in an arena."""
        return sum(
            max(arena.capacity, arena.held + more.get(arena, 0)) * self.page_bytes(arena)
            for arena in self.arenas.values()
        )

    @ordinary_tensors
    def serve(self, wants: Iterable[Want]) -> None:
        """Gives each table the pages to write what it wants: all of them or, if they do not fit, none.

        Raises:
            OutOfPages: the pool is bounded and has no room for them; nothing was changed.
        """
        wants = [want for want in wants if not want.table.may_write(want.first, want.slots)]
        if not wants:
            return
        # A cache that is collected meanwhile would give its pages back while they are counted.
        collecting = gc.isenabled()
        gc.disable()
        try:
            more = self._find_room(wants)
            for want in wants:
                table, arena = want.table, want.table.arena
                lacks = table.lacks(want)
                if arena.held + lacks > arena.capacity:
                    arena.grow(self._capacity(arena, more))
                more[arena] -= lacks
                table.serve(want)
        finally:
            if collecting:
                gc.enable()

    @ordinary_tensors
    def found(self, table: Table, own: torch.Tensor) -> None:
        """Gives an empty table new pages, which its rows share as in `own` `[rows, pages]`, where they count from 0.

        Raises:
            OutOfPages: as for `serve`.
        """
        count = int(own.max()) + 1
        self.serve([Want(table, 1, 0, count * self.page_size)])
        taken, table.pages = table.pages[0], table.pages[0][own]
        table.arena.hold(table.pages)
        table.arena.release(taken)
        table.writable = (0, 0)

    def _find_room(self, wants: list[Want]) -> dict[Arena, int]:
        """The pages that are lacking in each arena; there is room for them."""
        more = self._lacking(wants)
        if self.max_bytes is None or self._used(more) <= self.max_bytes:
            return more
        could = self.forgettable()
        least = {arena: arena.held + more.get(arena, 0) - could.get(arena, 0) for arena in self.arenas.values()}
        needed = sum(pages * self.page_bytes(arena) for arena, pages in least.items())
        if needed > self.max_bytes:
            raise OutOfPages(
                f"max_bytes={self.max_bytes} of the pool are not enough for these tokens: they take "
                f"{sum(more.values())} more pages of {self.page_size}, {needed} bytes in all. Drop a cache that "
                "is not used any more (del cache, or cache.reset()), crop one, or make the pool larger"
            )
        self.forget(self._needed(more) - self.max_bytes)
        for arena in self.arenas.values():
            # Another arena needs what is free here.
            target = arena.held + more.get(arena, 0)
            if self._used(more) > self.max_bytes and arena.capacity > target:
                arena.grow(target)
        return more

    def _lacking(self, wants: list[Want]) -> dict[Arena, int]:
        more: dict[Arena, int] = {}
        for want in wants:
            more[want.table.arena] = more.get(want.table.arena, 0) + want.table.lacks(want)
        return more

    def _needed(self, more: Mapping[Arena, int]) -> int:
        """Bytes of `more` pages in each arena and of those that are held, without any to spare."""
        return sum((arena.held + more.get(arena, 0)) * self.page_bytes(arena) for arena in self.arenas.values())

    def _capacity(self, arena: Arena, more: Mapping[Arena, int]) -> int:
        """Pages that an arena grows to when it and the others take `more`."""
        held = arena.held + more[arena]
        if self.max_bytes is None:
            return capacity_for(held)
        page = self.page_bytes(arena)
        others = self._used(more) - max(arena.capacity, held) * page
        return max(min(capacity_for(held), (self.max_bytes - others) // max(page, 1)), held)

    def forget(self, nbytes: int) -> None:
        """Gives up so many bytes of what nobody needs but might again, if they are more than 0."""

    def forgettable(self) -> dict[Arena, int]:
        """Pages of each arena that `forget` could give up."""
        return {}

    def check(self) -> None:
        """Raises AssertionError where a page was lost, or given to two."""
        for arena in self.arenas.values():
            arena.check()
