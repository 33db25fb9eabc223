"""Keys unlike the others stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.policies.scored import Arrival, Scored


@dataclass(frozen=True)
class KeyDiff(Scored):
    """Keeps the tokens whose keys are least like the mean direction of all keys seen.

    Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-Constrained
    Environments", 2025 (arXiv:2504.15364). A key is compared once, when its forward ends, with the sum of all keys of
    length 1 up to then: one fp32 vector a head is remembered.
    """

    def arrival(self, new: Arrival) -> torch.Tensor:
        unit = torch.nn.functional.normalize(new.keys.float(), dim=-1)
        if new.real is not None:
            unit = unit * new.real[:, None, :, None]
        anchor = unit.sum(2, keepdim=True)
        if "anchor" in new.memo:
            anchor = anchor + new.memo["anchor"]
        new.memo["anchor"] = anchor
        return -(unit * torch.nn.functional.normalize(anchor, dim=-1)).sum(-1)
