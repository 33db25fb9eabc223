"""Slots that the heads of a layer share: memory that is really ragged, not a mask over slots that are held anyway.

A head has as many slots as it was given and owns whole pages of them, so attention multiplies pages and never walks
over heads; at most one page a head is not full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from kvplug.codecs import Codec
from kvplug.stores.base import Held, State, expect
from kvplug.stores.contiguous import ContiguousStore, ordinary_tensors
from kvplug.stores.slots import CLOSED, EMPTY, Admission

# Most slots of a page, and least number of pages in a head's even share: what is not full is small beside the rest.
PAGE, PAGES = 16, 32
# The position of a slot that no head has.
NOBODY = -2


def page_of(budget: int) -> int:
    """Slots of a page, a power of two, where each head has `budget` tokens on average."""
    return 1 << min(PAGE, max(budget // PAGES, 1)).bit_length() - 1


@dataclass(frozen=True)
class Shares:
    """Which tokens each head keeps, and where.

    Attributes:
        source: int64 `[rows, pages * page]`, for each slot the candidate `head * candidates + c` that it holds, -1 for
            none, `NOBODY` where the slot is no head's.
        owners: int64 `[rows, pages]`, the head of each page, in rising order; the number of heads where it has none.
    """

    source: torch.Tensor
    owners: torch.Tensor

    @classmethod
    def of(cls, rank: torch.Tensor, kept: torch.Tensor, slots: torch.Tensor, page: int, pages: int) -> Shares:
        """Gives each head `slots` `[rows, heads]` slots and lays the tokens that it keeps in them, in order of rank.

        Args:
            rank: int64 `[rows, heads, candidates]`.
            kept: bool, same shape: which of them stay, at most as many as the head has slots.
            page, pages: slots of a page, and pages of a row, enough for all heads.
        """
        rows, heads, candidates = rank.shape
        owned = -(-slots // page)
        ends = owned.cumsum(-1)
        starts = (ends - owned) * page
        order = torch.where(kept, rank, -1).argsort(dim=-1, descending=True, stable=True)
        number = torch.arange(candidates, device=rank.device)
        place = torch.where(number < kept.sum(-1, keepdim=True), starts[..., None] + number, pages * page)
        source = torch.full((rows, pages * page + 1), -1, device=rank.device)
        names = order + torch.arange(heads, device=rank.device)[:, None] * candidates
        source = source.scatter(1, place.flatten(1), names.flatten(1))[:, :-1]
        owners = (torch.arange(pages, device=rank.device) >= ends[..., None]).sum(1)
        # The last page of a head may have more slots than the head.
        last = torch.nn.functional.pad(starts + slots, (0, 1)).gather(1, owners).repeat_interleave(page, dim=1)
        beyond = torch.arange(pages * page, device=rank.device) >= last
        return cls(source.masked_fill(beyond, NOBODY), owners)


class HeadStore(ContiguousStore):
    """One row of slots for all heads, `[batch, 1, pages * page, width]`; `owners` `[batch, pages]` tells whose each
    page is, the number of heads where it is nobody's. Its length never changes."""

    def __init__(self, keys: Codec, values: Codec, heads: int, tables: tuple[str, ...]):
        super().__init__(keys, values, tables=tables)
        self.heads = heads
        self.owners = torch.zeros(0, 0, dtype=torch.int16)

    @classmethod
    @ordinary_tensors
    def of(
        cls,
        store: ContiguousStore,
        keys: torch.Tensor,
        values: torch.Tensor,
        told: dict[str, torch.Tensor],
        shares: Shares,
    ) -> HeadStore:
        """The tokens that `shares` names, of those in `store` and the new ones `keys`, `values` `[batch, heads, tokens,
        width]`.

        Args:
            told: what the tables say of each candidate, `[batch, heads, candidates]`: those held, then the new ones.
        """
        batch, heads, tokens = keys.shape[:3]
        held, slots = store.length, shares.source.shape[1]
        if not store.searched:
            store.search(keys)
        new = cls(store.keys.codec, store.values.codec, heads, store.told)
        new.codecs, new.searched, new.limit = store.codecs, True, slots
        new.allocate(keys[:, :1], values[:, :1])
        new.reserve(slots)
        new.part(batch)
        new.length, new.owners = slots, shares.owners.to(torch.int16)
        source = shares.source.clamp(min=0)
        head, place = source // (held + tokens), source % (held + tokens)
        fresh = (place >= held)[:, None, :, None]
        before = place.clamp(max=max(held - 1, 0)) + (0 if isinstance(store, HeadStore) else head * held)
        after = head * tokens + (place - held).clamp(min=0)
        for side, old, x in ((new.keys, store.keys, keys), (new.values, store.values, values)):
            picked = x.flatten(1, 2).gather(1, after[..., None].expand(-1, -1, x.shape[-1]))[:, None]
            for name, block in side.codec.encode(picked).fields.items():
                if held:
                    kept = old.buffers[name][:, :, :held].flatten(1, 2)
                    kept = kept.gather(1, before[..., None].expand(-1, -1, block.shape[-1]))[:, None]
                    block = torch.where(fresh, block, kept)
                side.buffers[name].copy_(block)
        for name, x in told.items():
            x = x.expand(batch, heads, -1).flatten(1).gather(1, source)
            empty = shares.source if name == "positions" else 0
            new.tables[name].copy_(torch.where(shares.source >= 0, x, empty)[:, None])
        return new

    @property
    def page(self) -> int:
        return self.length // self.owners.shape[1]

    @property
    def slot_owners(self) -> torch.Tensor:
        """The head of each slot, int64 `[batch, slots]`."""
        return self.owners.long().repeat_interleave(self.page, dim=1)

    def quotas(self) -> torch.Tensor:
        """How many slots each head has, int64 `[batch, heads]`."""
        mine = self.slot_owners[:, None] == torch.arange(self.heads, device=self.owners.device)[:, None]
        return (mine & (self.positions != NOBODY)).sum(-1)

    def by_head(self, side: int, dtype: torch.dtype) -> torch.Tensor:
        """Keys (0) or values (1) decoded, `[batch, heads, most, dim]`; zero past what a head holds."""
        decoded = self.view(0, self.length)[side].decode(dtype)
        there = (self.positions >= 0) & (
            self.slot_owners[:, None] == torch.arange(self.heads, device=decoded.device)[:, None]
        )
        place = torch.argsort((~there).to(torch.uint8), dim=-1, stable=True)[..., : int(there.sum(-1).max())]
        picked = decoded.expand(-1, self.heads, -1, -1).gather(
            2, place[..., None].expand(-1, -1, -1, decoded.shape[-1])
        )
        return picked.masked_fill(~there.gather(-1, place)[..., None], 0)

    def free(self, rank: torch.Tensor) -> torch.Tensor:
        """A slot for one new token of each head: an empty one, else that of the lowest rank, int64 `[batch, heads]`.

        Args:
            rank: int64 `[batch, slots]`, ignored for empty slots.
        """
        held = self.positions[:, 0]
        rank = torch.where(held >= 0, rank, EMPTY + torch.arange(self.length, device=rank.device))
        rank = rank.masked_fill(held == NOBODY, CLOSED).unflatten(1, (-1, self.page))
        least, within = rank.min(-1)
        heads = torch.arange(self.heads, device=rank.device)[:, None]
        page = least[:, None].masked_fill(self.owners[:, None] != heads, CLOSED).argmin(-1)
        return page * self.page + within.gather(1, page)

    def put_one(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        real: torch.Tensor | None,
        scores: torch.Tensor | None,
    ) -> None:
        """Writes one new token of each head, `keys` and `values` `[batch, heads, 1, width]`, to the slots `[batch,
        heads]`, where `real` `[batch]`; `positions` and `scores` are `[batch, 1, heads]`."""
        batch = keys.shape[0]
        source = torch.arange(self.heads, device=keys.device).expand(batch, 1, -1)
        valid = None if real is None else real[:, None, None].expand(batch, 1, self.heads)
        admission = Admission(slots[:, None], source, valid, positions)
        self.put(keys.transpose(1, 2), values.transpose(1, 2), admission, scores)

    @ordinary_tensors
    def _rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tables = {name: change(table) for name, table in self.tables.items()}
        self.owners = change(self.owners)

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        self.owners = self.owners.to(device, non_blocking=True)

    def state(self) -> State:
        tensors, plain = super().state()
        return {**tensors, "owners": self.owners}, plain

    @ordinary_tensors
    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        tensors, plain = state
        self.limit = plain["length"]
        super().load_state(state, keys[:, :1], values[:, :1])
        owners = expect("owners", tensors["owners"], (keys.shape[0], None), torch.int16)
        self.owners = owners.to(keys.device, copy=True)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        yield self.owners

    def held(self) -> Held:
        held = super().held()
        return replace(held, tables=held.tables + self.owners.numel() * self.owners.itemsize)
