"""Which slot each new token gets, once the tokens are ranked: the mechanism under every evicting policy.

A step touches only the slots of its own tokens; nothing is moved to close a gap, since attention reads positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Below the rank of every token, with room to tell empty slots apart.
EMPTY = -(1 << 40)
PADDING = 4 * EMPTY
# Above the rank of every token: a slot that is not to be had.
CLOSED = 1 << 62


@dataclass(frozen=True)
class Admission:
    """Where new tokens go: token `source[..., j]` to slot `slots[..., j]`, if `valid[..., j]`.

    All are `[rows, heads, moves]`, `positions` the logical positions of the tokens; `valid` is None when every move is.
    """

    slots: torch.Tensor
    source: torch.Tensor
    valid: torch.Tensor | None
    positions: torch.Tensor


def admit(
    held: torch.Tensor,
    rank_held: torch.Tensor,
    new: torch.Tensor,
    rank_new: torch.Tensor,
    budget: int | torch.Tensor,
    newest_stays: bool = False,
) -> Admission:
    """Keeps the `budget` highest-ranked tokens and gives each new one among them a slot that is free.

    Args:
        held: int64 `[rows, heads, slots]`, position of the token in each slot, -1 for an empty one.
        rank_held: int64, same shape: the policy's rank, ignored for empty slots.
        new, rank_new: the same for the new tokens, `[rows, heads, tokens]`; position -1 is padding and never stays.
        budget: tokens that may stay, or how many in each row, int64 `[rows]`; they go to a row's first slots.
        newest_stays: the caller knows that there is one new token and that it stays.

    Slots are handed out empty ones first, in order, then those of the lowest rank; new tokens keep their order in time.
    """
    number = torch.arange(held.shape[-1], device=held.device)
    rank_held = torch.where(held >= 0, rank_held, EMPTY + number)
    closed = number >= budget[:, None, None] if isinstance(budget, torch.Tensor) else None
    if closed is not None:
        rank_held = rank_held.masked_fill(closed, CLOSED)
    if newest_stays:
        slot = rank_held.argmin(-1, keepdim=True)
        return Admission(slot, torch.zeros_like(slot), None, new.expand(*slot.shape[:2], -1))
    slots, tokens = held.shape[-1], new.shape[-1]
    rank_new = torch.where(new >= 0, rank_new, PADDING)
    competing = rank_held if closed is None else rank_held.masked_fill(closed, PADDING)
    ranks = torch.cat([competing, rank_new], -1)
    threshold = _least(ranks, budget).clamp(min=0)
    stays = rank_new >= threshold
    moves = min(tokens, slots)
    freed = rank_held.topk(moves, dim=-1, largest=False, sorted=True)
    source = torch.argsort((~stays).to(torch.uint8), dim=-1, stable=True)[..., :moves]
    valid = stays.gather(-1, source) & (freed.values < threshold)
    return Admission(freed.indices, source, valid, new.expand(*source.shape[:2], -1).gather(-1, source))


def _least(ranks: torch.Tensor, budget: int | torch.Tensor) -> torch.Tensor:
    """The `budget`-th highest rank of each row and head, or the lowest where there are fewer: `[rows, heads, 1]`."""
    most = ranks.shape[-1]
    if not isinstance(budget, torch.Tensor):
        return ranks.topk(min(budget, most), dim=-1).values[..., -1:]
    index = (budget.clamp(max=most) - 1)[:, None, None].expand(*ranks.shape[:2], 1)
    return ranks.sort(dim=-1, descending=True).values.gather(-1, index)
