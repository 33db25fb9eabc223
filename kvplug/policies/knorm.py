"""Small keys stay: the norm of a key tells how much attention it will draw."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.policies.scored import Arrival, Scored


@dataclass(frozen=True)
class KeyNorm(Scored):
    """Keeps the tokens whose keys have the smallest L2 norm.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", 2024 (arXiv:2406.11430).
    """

    def arrival(self, new: Arrival) -> torch.Tensor:
        return -new.keys.float().norm(dim=-1)
