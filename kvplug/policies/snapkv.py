"""The last queries vote, and neighbours of what they look at stay with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.policies.positional import check_count
from kvplug.policies.scored import Scored


@dataclass(frozen=True)
class Votes(Scored):
    """Keeps the tokens with the most votes of the last `observe` queries, pooled over `kernel` neighbours in time.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv:2404.14469). A vote is the
    attention that a query pays, the mean over the query heads that share a key-value head; a token has the mean of the
    last `observe` queries' votes, pooled as the largest among its neighbours in the head. While decoding, each query
    counts 1/`observe` and what was before fades by as much. By default the last `observe` tokens stay, up to half of
    the budget.
    """

    observe: int = 32
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("observe", self.observe, 1)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel={self.kernel!r} is not valid: an odd number of tokens is accepted")

    @property
    def watched(self) -> int:
        return self.observe

    def default_recent(self, budget: int) -> int:
        return min(self.observe, budget // 2)

    def renew(self, scores: torch.Tensor, mass: torch.Tensor, queries: int | torch.Tensor) -> torch.Tensor:
        return scores * (1 - queries / self.observe) + mass / self.observe

    def compared(self, scores: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor | None = None):
        if self.kernel == 1:
            return scores
        # Slots are in no order: neighbours are those among the tokens that are there, in time.
        heads = torch.zeros_like(positions) if owners is None else owners
        heads = torch.where(positions < 0, -1, heads)
        inner = (positions + (heads << 32)).expand_as(scores).argsort(-1)
        voted, heads = scores.gather(-1, inner), heads.expand_as(scores).gather(-1, inner)
        pooled = voted
        for step in range(1, self.kernel // 2 + 1):
            for a, b in ((slice(step, None), slice(None, -step)), (slice(None, -step), slice(step, None))):
                near = torch.where(heads[..., a] == heads[..., b], voted[..., b], 0)
                pooled = torch.cat(
                    [pooled[..., :step], torch.maximum(pooled[..., a], near)]
                    if a.start
                    else [torch.maximum(pooled[..., a], near), pooled[..., -step:]],
                    dim=-1,
                )
        return torch.empty_like(scores).scatter_(-1, inner, pooled)
