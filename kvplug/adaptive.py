"""A layer whose heads compete for its tokens (Ada-KV), in memory that is really ragged.

A forward of several tokens that ends above the budget shares the layer's slots out among its heads, by score; a decoded
token takes the place of its own head's least. Until then all heads have as many.
"""

from __future__ import annotations

import torch

from kvplug.scored import ScoredLayer
from kvplug.stores import State
from kvplug.stores.heads import HeadStore, Shares, page_of
from kvplug.view import Segment

# The part of an even share that every head has, whatever its scores: `alpha` of Ada-KV.
LEAST = 0.2


def best_of_all(rank: torch.Tensor, budgets: torch.Tensor, least: float) -> torch.Tensor:
    """Which tokens stay if all heads of a row compete, bool like `rank`.

    Args:
        rank: int64 `[rows, heads, candidates]`, in each head distinct and below 2^55, -1 for none.
        budgets: int64 `[rows]`: `heads * budgets` tokens of a row stay.
        least: each head has its best tokens for sure, as many as this share of the row's budget.
    """
    heads = rank.shape[1]
    number = torch.arange(heads, device=rank.device)[:, None]
    places = rank.argsort(dim=-1, descending=True).argsort(dim=-1)
    sure = places < (budgets * least).long()[:, None, None]
    # Distinct over heads too: of equal ranks that of the first head wins.
    rank = torch.where(rank < 0, -1, (rank + (sure.long() << 55)) * heads + heads - 1 - number)
    ordered = rank.flatten(1).sort(dim=-1, descending=True).values
    last = (heads * budgets).clamp(max=ordered.shape[1])[:, None] - 1
    return (rank >= ordered.gather(1, last)[..., None]) & (rank >= 0)


class AdaptiveLayer(ScoredLayer):
    """A full-attention layer under a `Scored` policy with `heads="adaptive"`: `budget` is the mean over its heads."""

    @property
    def shared(self) -> bool:
        """Whether the heads own pages by now."""
        return isinstance(self.store, HeadStore)

    @property
    def kept(self) -> int | float:
        if not self.shared:
            return super().kept
        return self.store.length / self.shape[1] + self.unfinished

    @property
    def holes(self) -> bool:
        return self.shared or super().holes

    def _contents(self, side: int) -> torch.Tensor | None:
        if not self.shared:
            return super()._contents(side)
        self.settle()
        decoded = self.store.by_head(side, self.dtype)
        return decoded if self.fresh is None else torch.cat([decoded, self.fresh[side]], dim=2)

    def _stored(self, before: int) -> list[Segment]:
        if not self.shared:
            return super()._stored(before)
        store = self.store
        keys, values = store.view(0, store.length)
        return [Segment(keys, values, positions=store.positions, owners=store.owners)]

    def _see(self, weights: torch.Tensor, new: torch.Tensor | None = None) -> None:
        if new is None:
            super()._see(weights)
        else:
            mass = [self.policy.reduce(x.detach()).flatten(1)[:, None] for x in (weights, new)]
            self._add(torch.cat(mass, dim=-1))

    def _joined(self, new: torch.Tensor) -> torch.Tensor:
        return super()._joined(new.flatten(1)[:, None] if self.shared else new)

    def _choose(self, keys, values, scores: torch.Tensor, number: torch.Tensor, positions: torch.Tensor) -> None:
        batch, heads, tokens = keys.shape[:3]
        if self.shared:
            self._choose_shared(keys, values, scores, positions.expand(batch, 1, -1))
        elif tokens == 1:
            super()._choose(keys, values, scores, number, positions)
        else:
            held = self.store.positions.long().expand(batch, -1, -1)
            at = torch.cat([held, positions.expand(batch, held.shape[1], -1)], dim=-1).expand(batch, heads, -1)
            first, last = self._protected(at[:, 0])
            rank = self.policy.rank(self.policy.compared(scores, at), at, at < first, at >= last)
            told = {"positions": at, "scores": scores}
            self._share_out(keys, values, torch.where(at >= 0, rank, -1), told, positions)

    def _choose_shared(self, keys, values, scores: torch.Tensor, new: torch.Tensor) -> None:
        """As `_choose`, where all candidates are in one row: those in the slots, then each head's new ones."""
        batch, heads, tokens = keys.shape[:3]
        held, here, mine = self.store.length, self.store.positions.long(), self.store.slot_owners[:, None]
        at = torch.cat([here, new.repeat(1, 1, heads)], dim=-1)
        names = torch.arange(heads, device=keys.device)
        owners = torch.cat([mine, names.repeat_interleave(tokens).expand(batch, 1, -1)], dim=-1)
        # What one of the heads holds tells the last tokens of a row.
        first, last = self._protected(torch.cat([torch.where(mine == 0, here, -1), new], dim=-1)[:, 0])
        rank = self.policy.rank(self.policy.compared(scores, at, owners), at, at < first, at >= last)
        if tokens == 1:
            slots = self.store.free(rank[:, 0, :held])
            told = None
            if self.policy.lasting:
                self.store.scores.copy_(scores[..., :held])
                told = scores[..., held:]
            real = None if self.padding is None else new[:, 0, 0] >= 0
            self.store.put_one(keys, values, slots, new.expand(-1, -1, heads), real, told)
            return
        rank = torch.where(at >= 0, rank, -1)

        def by_head(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[..., :held].expand(-1, heads, -1), x[:, 0, held:].unflatten(1, (heads, -1))], dim=-1)

        told = {"positions": by_head(at), "scores": by_head(scores)}
        rank = by_head(rank)
        rank[..., :held].masked_fill_(mine != names[:, None], -1)
        self._share_out(keys, values, rank, told, new)

    def _share_out(self, keys, values, rank: torch.Tensor, told: dict[str, torch.Tensor], new: torch.Tensor) -> None:
        """Shares the slots out: in rows that have had more tokens than the budget, the highest ranks of all heads stay.

        Args:
            rank: int64 `[batch, heads, candidates]`, -1 for none.
            told: what the store's tables say of the candidates.
            new: positions of the new tokens, `[rows, 1, tokens]`. Of a row that gets at most one the heads keep as many
                slots as they have.
        """
        heads, budget = rank.shape[1], self.budget
        budgets = torch.full_like(rank[:, 0, 0], budget) if self._by_row is None else self._by_row[:, 0]
        seen = self.seen if self.padding is None else self.seen - self.padding
        even = (budgets >= seen)[:, None]
        kept = torch.where(even[..., None], rank >= 0, best_of_all(rank, budgets, LEAST))
        slots = torch.where(even, budgets[:, None], kept.sum(-1))
        if self.padding is not None:
            single = (new >= 0).sum(-1) <= 1
            own = self.store.quotas() if self.shared else budgets[:, None].expand_as(slots)
            within = (rank.argsort(dim=-1, descending=True).argsort(dim=-1) < own[..., None]) & (rank >= 0)
            kept, slots = torch.where(single[..., None], within, kept), torch.where(single, own, slots)
        page = page_of(budget)
        shares = Shares.of(rank, kept, slots, page, heads * (budget + page - 1) // page)
        self.store = HeadStore.of(self.store, keys, values, {name: told[name] for name in self.store.told}, shares)

    def state(self) -> State:
        tensors, plain = super().state()
        return tensors, {**plain, "shared": self.shared}

    def load_state(self, state: State, device: torch.device) -> None:
        plain = state[1]
        if plain["shared"]:
            self.store = HeadStore(*self.store.codecs, plain["shape"][1], self.store.told)
        super().load_state(state, device)

    def reset(self) -> None:
        if self.shared:
            self.store = self._empty_store(*self.store.codecs)
        super().reset()
