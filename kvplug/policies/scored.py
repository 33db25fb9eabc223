"""Policies that keep what scores highest: the protocol of a score, and the two kinds of tokens that need none.

Every key-value head has scores and a choice of its own. A policy says what a score is; where tokens lie, and whose
memory is given to whom, is the layer's affair.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvplug.policies.base import Policy
from kvplug.policies.positional import check_count
from kvplug.rope import Rope

HEADS = ("uniform", "adaptive")
# Bits that tell positions apart where scores are equal, and last bits of a score that don't count: what two orders of
# summation make of equal tokens must not decide which of them goes.
TIE, NOISE = 28, 8
# Above the rank of any score: first tokens and recent ones stay whatever they score.
PROTECTED = 1 << 54


def check_budget(budget: int | float) -> None:
    """Raises ValueError unless `budget` is a number of tokens, or a share of the prompt between 0 and 1."""
    if isinstance(budget, float) and 0 < budget <= 1:
        return
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(
            f"budget={budget!r} is not valid: a whole number of tokens of at least 1, or a share of the prompt as a "
            "float above 0 and up to 1.0 is accepted"
        )


def _positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < float("inf")


def pyramid(count: int) -> tuple[float, ...]:
    """Shares that fall evenly from the first of `count` layers to the last, which has 1/20 of the mean."""
    low = 1 / 20
    return tuple(2 - low - (2 - 2 * low) * i / max(count - 1, 1) for i in range(count)) if count > 1 else (1.0,)


def tokens_of(budget: int | float, prompt: int) -> int:
    """A budget in tokens, at least 1, for a prompt of `prompt` tokens."""
    return max(int(budget * prompt), 1) if isinstance(budget, float) else budget


def order(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 ranks, all distinct and not negative, that sort as the scores do; of scores that agree to 2^-15 the later
    token wins.

    Args:
        scores: fp32, any shape.
        positions: int64 that broadcast to it, below 2^28.
    """
    bits = scores.contiguous().view(torch.int32).long()
    # The bits of a float sort as it does, but for the sign.
    bits = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits) + (1 << 31) + (1 << NOISE - 1)
    return (bits >> NOISE << TIE) + positions


@dataclass(frozen=True)
class Arrival:
    """New tokens of a layer, and what a policy may need to score them.

    Attributes:
        keys, values: `[batch, kv_heads, tokens, width]`.
        number: int64 `[rows, 1, tokens]`, each token's number among the real ones of its row.
        memo: what the policy remembers of the layer from forward to forward, a row of the batch in each row.
        real: bool `[batch, tokens]`, False for padding; None where there is none.
        query: `[batch, heads, queries, head_dim]` of the forward, None where its attention was not ours.
        rope: the model's rotation, for a policy that `needs_rope`; None where the layer has none.
    """

    keys: torch.Tensor
    values: torch.Tensor
    number: torch.Tensor
    memo: dict[str, torch.Tensor]
    real: torch.Tensor | None = None
    query: torch.Tensor | None = None
    rope: Rope | None = None


@dataclass(frozen=True)
class Scored(Policy):
    """Keeps in each key-value head the first `sinks` tokens, the last `recent` ones, and those of the highest score.

    Args:
        budget: tokens kept in a layer by each key-value head, or a share of the first forward's tokens (0.25), at
            least 1. With `heads="adaptive"` it is the mean over a layer's heads.
        recent: last tokens that stay whatever they score, the newest at least; None for the policy's own number.
        sinks: first tokens that stay whatever they score; as many as there is room for beside the recent ones.
        heads: "uniform" gives each head of a layer `budget` tokens; "adaptive" lets the heads of a layer compete for
            them (Feng et al., "Ada-KV", 2024, arXiv:2407.11550).
        layers: how the budget is shared out: None gives each layer `budget`, "pyramid" the first layers most and the
            last ones least (Cai et al., "PyramidKV", 2024, arXiv:2406.02069), a list one share for each full-attention
            layer, whose mean counts as `budget`.

    Raises:
        ValueError: an argument is not valid; names it and what is accepted.
    """

    budget: int | float
    recent: int | None = None
    sinks: int = 4
    heads: str = "uniform"
    layers: str | tuple[float, ...] | None = None

    # Whether the policy turns keys or queries to other positions.
    needs_rope: ClassVar[bool] = False
    # Last queries of a forward whose attention the policy reads: none, some, or None for all.
    queries: ClassVar[int | None] = 0
    # Whether a score lasts beyond its forward, so that one is stored for each token.
    lasting: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_budget(self.budget)
        check_count("sinks", self.sinks, 0)
        if self.recent is not None:
            check_count("recent", self.recent, 1)
            if isinstance(self.budget, int) and self.recent > self.budget:
                raise ValueError(f"recent={self.recent!r} is not valid: up to budget={self.budget} is accepted")
        if self.heads not in HEADS:
            raise ValueError(f"heads={self.heads!r} is not known; use one of {', '.join(HEADS)}")
        if isinstance(self.layers, list):
            object.__setattr__(self, "layers", tuple(self.layers))
        shares = self.layers if isinstance(self.layers, tuple) else (1,)
        if (
            (isinstance(self.layers, str) and self.layers != "pyramid")
            or not all(_positive(x) for x in shares)
            or not shares
        ):
            raise ValueError(
                f"layers={self.layers!r} is not valid: None, 'pyramid' or a list of positive numbers, one for each "
                "full-attention layer, is accepted"
            )

    def of_layers(self, count: int) -> list[Scored]:
        """The policy of each of `count` layers.

        Raises:
            ValueError: there is not one share for each layer.
        """
        if self.layers is None:
            return [self] * count
        shares = pyramid(count) if self.layers == "pyramid" else self.layers
        if len(shares) != count:
            raise ValueError(
                f"layers={self.layers!r} has {len(shares)} shares; one for each of the {count} full-attention layers "
                "is accepted"
            )
        mean = sum(shares) / count
        if isinstance(self.budget, float):
            budgets = [min(self.budget * share / mean, 1.0) for share in shares]
        else:
            # Rounded so that the whole budget is given away.
            ends = [round(self.budget * total / mean) for total in itertools.accumulate(shares)]
            budgets = [max(end - start, 1) for start, end in itertools.pairwise([0, *ends])]

        def of(budget: int | float) -> Scored:
            recent = self.recent
            if recent is not None and isinstance(budget, int):
                recent = min(recent, budget)
            return replace(self, budget=budget, recent=recent, layers=None)

        return [of(budget) for budget in budgets]

    @property
    def needs_queries(self) -> bool:
        return self.watched != 0

    @property
    def watched(self) -> int | None:
        """How many of a forward's last queries are read, None for all."""
        return self.queries

    def tokens(self, prompt: int) -> int:
        """The budget in tokens, for a first forward of `prompt` tokens."""
        return tokens_of(self.budget, prompt)

    def protected(self, budget: int) -> tuple[int, int]:
        """First and last tokens that stay whatever they score, of a budget of `budget` tokens."""
        recent = max(min(self.default_recent(budget) if self.recent is None else self.recent, budget), 1)
        return min(self.sinks, budget - recent), recent

    def default_recent(self, budget: int) -> int:
        """Last tokens that stay where the user has not said."""
        return 1

    # What a subclass says of scores; all are fp32 `[batch, kv_heads, tokens]`

    def arrival(self, new: Arrival) -> torch.Tensor:
        """Scores of new tokens, before what attention says of them."""
        return new.keys.new_zeros(new.keys.shape[:3], dtype=torch.float32)

    def reduce(self, weights: torch.Tensor) -> torch.Tensor:
        """What is kept of some queries' attention.

        Args:
            weights: fp32 `[batch, kv_heads, group, queries, slots]`, zero in the rows of padding.

        Returns:
            `[batch, kv_heads, slots]`, which are added up over the blocks of a forward.
        """
        return weights.sum(3).mean(2)

    def renew(self, scores: torch.Tensor, mass: torch.Tensor, queries: int | torch.Tensor) -> torch.Tensor:
        """Scores of all tokens, held and new ones, after a forward.

        Args:
            scores: what they were.
            mass: what `reduce` gave over the watched queries.
            queries: how many those were, a number or one for each row, `[batch, 1, 1]`.
        """
        return scores

    def compared(self, scores: torch.Tensor, positions: torch.Tensor, owners: torch.Tensor | None = None):
        """What is compared when tokens have to go.

        Args:
            scores: `[batch, kv_heads, candidates]`, or `[batch, 1, candidates]` of all heads in one row.
            positions: int64, same shape, -1 for empty slots and padding.
            owners: the head of each candidate, int64, same shape, where those of all heads are in one row.
        """
        return scores

    def rank(
        self, scores: torch.Tensor, positions: torch.Tensor, first: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """The rank of each candidate: the highest stay.

        Args:
            scores: what `compared` gave.
            positions: int64 of the same shape.
            first, last: bool that broadcast to it: which tokens stay whatever they score.
        """
        return order(scores, positions.clamp(min=0)) + PROTECTED * (first | last)
