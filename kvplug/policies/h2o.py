"""Heavy hitters: the tokens that have drawn the most attention so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvplug.policies.scored import Scored


@dataclass(frozen=True)
class HeavyHitters(Scored):
    """Keeps the tokens with the most attention from all queries so far, those of the prompt included.

    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023
    (arXiv:2306.14048). A token's score is the sum over queries of the mean over the query heads that share the
    key-value head. By default half of the budget is for recent tokens, as in the paper.
    """

    queries: ClassVar[int | None] = None

    def default_recent(self, budget: int) -> int:
        return budget // 2

    def renew(self, scores: torch.Tensor, mass: torch.Tensor, queries: int | torch.Tensor) -> torch.Tensor:
        return scores + mass
