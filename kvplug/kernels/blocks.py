"""Attention for few queries, straight from the encoded bytes, in blocks of a bounded size.

The whole cache is never decoded: a block of codes is turned into fp32, multiplied and dropped. Scales and zero points
are applied to scores and weights, a rotated codec's rotation to the query and the output.
"""

from __future__ import annotations

import torch

from kvplug.codecs import Encoded
from kvplug.view import KVView

# Elements of a block of codes once they are fp32: 16 MiB. Smaller ones would fit a core's cache but cost more calls.
BLOCK_ELEMENTS = 1 << 22


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.attend`, the output alone. Memory is linear in `heads * queries * slots`."""
    batch, heads, queries, _ = query.shape
    kv_heads = next(view.segments[0].keys.tensors()).shape[1]
    group = heads // kv_heads
    rows = (query.float() * scale).reshape(batch, kv_heads, group * queries, -1)
    scores = [_scores(rows, segment.keys) for segment in view.segments]
    scores = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = _masked(scores, mask, group)
    weights = _softmax(scores, sinks, kv_heads, group, queries)
    out, start = 0, 0
    for segment in view.segments:
        out = out + _weighted(weights[..., start : start + segment.tokens], segment.values)
        start += segment.tokens
    return out.reshape(batch, heads, queries, -1).to(query.dtype)


def _masked(scores: torch.Tensor, mask: torch.Tensor, group: int) -> torch.Tensor:
    """Applies a mask `[.., 1, kv_heads or heads, queries, slots]` to scores `[batch, kv_heads, rows, slots]`."""
    batch, kv_heads, rows, slots = scores.shape
    queries = rows // group
    if mask.shape[1] == kv_heads * group:
        mask = mask.reshape(mask.shape[0], kv_heads, group, queries, slots)
    else:
        mask = mask[:, :, None]
    scores = scores.reshape(batch, kv_heads, group, queries, slots)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    return scores.reshape(batch, kv_heads, rows, slots)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int, group: int, queries: int) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float().reshape(1, kv_heads, group, 1).expand(scores.shape[0], -1, -1, queries)
    extra = extra.reshape(scores.shape[0], kv_heads, group * queries, 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]


def _blocks(encoded: Encoded):
    """The encoded tokens in blocks of about `BLOCK_ELEMENTS`, with where each starts."""
    sample = next(encoded.tensors())
    step = max(BLOCK_ELEMENTS // max(sample.shape[0] * sample.shape[1] * encoded.dim, 1), 1)
    for start in range(0, encoded.tokens, step):
        yield start, encoded.narrow(start, min(step, encoded.tokens - start))


def _scores(rows: torch.Tensor, keys: Encoded) -> torch.Tensor:
    """rows `[batch, kv_heads, rows, head_dim]` times the keys: `[batch, kv_heads, rows, tokens]`, fp32."""
    rotated = keys.codec.rotate(rows)
    total = None
    out = []
    for _, block in _blocks(keys):
        part = block.linear()
        product = rotated @ part.codes.transpose(-1, -2)
        if part.scale is not None:
            product = product * part.scale
        if part.zero is not None:
            total = rotated.sum(-1, keepdim=True) if total is None else total
            product = product + total * part.zero
        out.append(product)
    return out[0] if len(out) == 1 else torch.cat(out, dim=-1)


def _weighted(weights: torch.Tensor, values: Encoded) -> torch.Tensor:
    """Weights `[batch, kv_heads, rows, tokens]` times the values: `[batch, kv_heads, rows, value_dim]`, fp32."""
    out = 0
    for start, block in _blocks(values):
        part = block.linear()
        share = weights[..., start : start + block.tokens]
        product = (share if part.scale is None else share * part.scale) @ part.codes
        if part.zero is not None:
            product = product + (share * part.zero).sum(-1, keepdim=True)
        out = out + product
    return values.codec.unrotate(out)
