"""The queries to come are like those that were: what they will attend to, without having been asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvplug.policies.positional import check_count
from kvplug.policies.scored import Arrival, Scored

# Queries of a forward from which on their mean and covariance are taken anew.
MANY = 64
# Stands for a row of which no queries were seen.
UNKNOWN = math.inf


@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """Keeps the tokens that the next `future` queries are expected to attend to most, weighted with their values.

    Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution", 2025 (arXiv:2510.00636). Queries are taken for Gaussian: their mean and covariance, before rotation
    and without those of the sinks, are turned to the positions to come, and exp(query . key) is expected under them,
    times the norm of the value. A token is scored once, when its forward ends. A later forward of fewer than 64 tokens
    is scored with the mean and the variances of the last longer one, over the query heads that share a key-value head.
    """

    future: int = 512

    needs_rope: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("future", self.future, 1)

    @property
    def needs_queries(self) -> bool:
        return True

    def arrival(self, new: Arrival) -> torch.Tensor:
        keys = new.keys.float()
        batch, kv_heads, tokens, dim = keys.shape
        if "mean" not in new.memo:
            new.memo.update({name: keys.new_zeros(batch, kv_heads, 1, dim) for name in ("mean", "variance")})
            new.memo["total"] = keys.new_full((batch, kv_heads, 1), UNKNOWN)
            many = True
        else:
            many = tokens >= MANY or new.real is not None
        old = self._remembered(new.memo, keys)
        if many and new.query is not None and new.query.shape[2] == tokens:
            old = self._anew(new, keys, old)
        return old * new.values.float().norm(dim=-1)

    def _remembered(self, memo: dict[str, torch.Tensor], keys: torch.Tensor) -> torch.Tensor:
        """Attention that is expected from what was seen of earlier queries; 1 where that is nothing."""
        dim = keys.shape[-1]
        logits = (keys * memo["mean"]).sum(-1) / math.sqrt(dim) + (keys.square() * memo["variance"]).sum(-1) / dim / 2
        return torch.where(memo["total"] == UNKNOWN, 1, (logits - memo["total"]).exp())

    def _anew(self, new: Arrival, keys: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        """The same from this forward's queries, for rows with many of them or without any before; remembers them."""
        batch, kv_heads, _, dim = keys.shape
        query = new.query.float()
        number = new.number.expand(batch, 1, -1)[:, 0]
        real = torch.ones_like(number, dtype=torch.bool) if new.real is None else new.real
        counted = real & (number >= self.sinks)
        count = real.sum(-1)[:, None, None]
        due = (count >= MANY) | ((new.memo["total"] == UNKNOWN) & (count > 0))
        if new.rope is not None:
            query = new.rope.rotate(query, -number)
        share = counted.float() / counted.sum(-1, keepdim=True).clamp(min=1)
        mean = torch.einsum("bt,bhtd->bhd", share, query)
        centred = query - mean[:, :, None]
        covariance = torch.einsum("bt,bhti,bhtj->bhij", share, centred, centred)
        if new.rope is not None:
            # What a query turned by the mean of the rotations to come is, for its mean and on both sides of the rest.
            last = torch.where(real, number, -1).amax(-1)
            turn = new.rope.mean_rotation(last + 1, self.future, dim)[:, None]
            mean = (turn @ mean[..., None])[..., 0]
            covariance = turn @ covariance @ turn.transpose(-1, -2)
        mean, covariance = (x.unflatten(1, (kv_heads, -1)) for x in (mean, covariance))
        logits = torch.einsum("bhgd,bhtd->bhgt", mean, keys) / math.sqrt(dim)
        spread = torch.einsum("bhti,bhgij->bhgtj", keys, covariance)
        logits = logits + (spread * keys[:, :, None]).sum(-1) / dim / 2
        # Sinks would draw nearly all of it, and stay whatever they score.
        logits = logits.masked_fill(~counted[:, None, None], torch.finfo(logits.dtype).min)
        centre = mean.mean(2, keepdim=True)
        variance = (covariance.diagonal(dim1=-2, dim2=-1) + (mean - centre).square()).mean(2, keepdim=True)
        total = torch.where(counted.any(-1)[:, None, None], logits.logsumexp(-1).mean(2)[..., None], 0)
        told = {"mean": centre, "variance": variance, "total": total}
        for name, x in told.items():
            new.memo[name] = torch.where(due if x.ndim == 3 else due[..., None], x, new.memo[name])
        return torch.where(due, logits.softmax(-1).mean(2) * counted[:, None], old)
