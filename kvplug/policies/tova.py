"""The newest query decides: what it attends to least goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvplug.policies.scored import Scored


@dataclass(frozen=True)
class NewestQuery(Scored):
    """Keeps the tokens to which the newest query attends most.

    Oren et al., "Transformers are Multi-State RNNs", 2024 (arXiv:2401.06104). The attention is the mean over all query
    heads of the layer, as in the paper, so that all key-value heads keep the same tokens: what few heads look at stays
    in the others too. Nothing is remembered, so no score is stored.
    """

    queries: ClassVar[int | None] = 1
    lasting: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads == "adaptive":
            raise ValueError(
                f"heads={self.heads!r} can't be had with TOVA: all heads keep the same tokens; 'uniform' is accepted"
            )

    def reduce(self, weights: torch.Tensor) -> torch.Tensor:
        return weights.sum(3).mean((1, 2))[:, None].expand(-1, weights.shape[1], -1)

    def renew(self, scores: torch.Tensor, mass: torch.Tensor, queries: int | torch.Tensor) -> torch.Tensor:
        return mass
