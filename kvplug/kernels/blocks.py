"""Attention for few queries, straight from the encoded bytes, in blocks of a bounded size.

The whole cache is never decoded: a block of codes is turned into fp32, multiplied and dropped. Scales and zero points
are applied to scores and weights, a rotated codec's rotation to the query and the output.
"""

from __future__ import annotations

import torch

from kvplug.codecs import Encoded
from kvplug.view import KVView

# Elements of a block of codes, 8 MiB once they are fp32. Smaller ones would fit a core's cache but cost more calls.
BLOCK_ELEMENTS = 1 << 21


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
    scores = rows.new_empty(*rows.shape[:3], view.tokens)
    start = 0
    for segment in view.segments:
        _scores(rows, segment.keys, scores[..., start : start + segment.tokens])
        start += segment.tokens
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
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
    granule = encoded.codec.granule
    step = max(BLOCK_ELEMENTS // max(sample.shape[0] * sample.shape[1] * encoded.dim * granule, 1), 1) * granule
    for start in range(0, encoded.tokens, step):
        yield start, encoded.narrow(start, min(step, encoded.tokens - start))


def _scores(rows: torch.Tensor, keys: Encoded, out: torch.Tensor) -> None:
    """Writes rows `[batch, kv_heads, rows, head_dim]` times the keys to `out` `[batch, kv_heads, rows, tokens]`."""
    rotated, granule = keys.codec.rotate(rows), keys.codec.granule
    total = None
    for start, block in _blocks(keys):
        part = block.linear()
        scores = out[..., start : start + block.tokens]
        products = _product(part.split(rotated), part.codes.transpose(-1, -2))
        if part.scale is None:
            torch.sum(products, 0, out=scores)
        elif len(products) == 1:
            torch.mul(products[0], part.scale, out=scores)
        else:
            torch.mul(products.sum(0), part.scale, out=scores)
        if part.zero is not None:
            total = rotated.sum(-1, keepdim=True) if total is None else total
            scores.addcmul_(total, part.zero)
        if part.offset is not None:
            groups = rotated @ part.offset.transpose(-1, -2)
            whole = block.tokens // granule
            scores[..., : whole * granule].unflatten(-1, (whole, granule)).add_(groups[..., :whole, None])
            scores[..., whole * granule :].add_(groups[..., whole:])


def _weighted(weights: torch.Tensor, values: Encoded) -> torch.Tensor:
    """Weights `[batch, kv_heads, rows, tokens]` times the values: `[batch, kv_heads, rows, value_dim]`, fp32."""
    out = 0
    for start, block in _blocks(values):
        part = block.linear()
        share = weights[..., start : start + block.tokens]
        scaled = share if part.scale is None else share * part.scale
        product = part.join(_product(scaled[None], part.codes), values.dim)
        if part.zero is not None:
            product = product + share @ part.zero.transpose(-1, -2)
        if part.offset is not None:
            product = product + _by_group(share, values.codec.granule) @ part.offset
        out = out + product
    return values.codec.unrotate(out)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a `[..., rows, n]` times b `[..., n, m]`. Four rows take less time than three, and eight than seven."""
    rows = a.shape[-2]
    if rows % 4 != 3:
        return a @ b
    return (torch.nn.functional.pad(a, (0, 0, 0, 1)) @ b)[..., :rows, :]


def _by_group(weights: torch.Tensor, granule: int) -> torch.Tensor:
    """Sums of weights `[batch, kv_heads, rows, tokens]` over groups of tokens: `[batch, kv_heads, rows, groups]`."""
    lacking = -weights.shape[-1] % granule
    if lacking:
        weights = torch.nn.functional.pad(weights, (0, lacking))
    return weights.unflatten(-1, (-1, granule)).sum(-1)
