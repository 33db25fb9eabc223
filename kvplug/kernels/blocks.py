"""Attention for few queries, straight from the encoded bytes, in blocks of a bounded size.

The whole cache is never decoded: a block of codes is turned into fp32, multiplied and dropped. Scales and zero points
are applied to scores and weights, a rotated codec's rotation to the query and the output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvplug.codecs import Encoded
from kvplug.codecs.base import from_planes, to_planes
from kvplug.kernels import dense
from kvplug.view import KVView, Segment

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
    """As `reference.attend`, the output alone; the view's watch is shown the weights. Memory is linear in `heads *
    queries * slots`."""
    batch, heads, queries, _ = query.shape
    shared = any(segment.sharing is not None for segment in view.segments)
    if shared and mask is None and sinks is None and view.watch is None:
        return _merged(query, view, scale, softcap)
    weights = _weights(query, view, mask, scale, softcap, sinks)
    if view.watch is not None:
        counted = view.counted(mask, view.tokens)
        view.watch.take(told(weights, counted, view.watch.first(queries, counted), slice(0, queries)))
    count = weights.shape[2]
    if count % 4 == 3:
        weights = torch.nn.functional.pad(weights, (0, 0, 0, 1))
    out, start = 0, 0
    for segment in view.segments:
        out = out + segment_weighted(weights[..., start : start + segment.tokens], segment)
        start += segment.tokens
    return out[:, :, :count].reshape(batch, heads, queries, -1).to(query.dtype)


def _merged(query: torch.Tensor, view: KVView, scale: float, softcap: float | None) -> torch.Tensor:
    """As `attend` where all slots are seen: each segment by itself, so that what shares keys stays side by side, and
    then their outputs weighted with the sums of their scores' exponentials."""
    batch, heads, queries, _ = query.shape
    kv_heads = view.kv_heads
    rows = (query.float() * scale).reshape(batch, kv_heads, heads // kv_heads * queries, -1)
    outs, sums = [], []
    for segment in view.segments:
        sharing = segment.sharing
        own = rows if sharing is None else sharing.together(rows)
        found = dense.with_sums(own, segment) if softcap is None else None
        found = found or _with_sums(own, segment, softcap)
        for kind, x in zip((outs, sums), found, strict=True):
            kind.append(x if sharing is None else sharing.apart(x))
    out = outs[0]
    if len(outs) > 1:
        share = torch.stack(sums).softmax(0)
        out = (torch.stack(outs) * share).sum(0)
    return out.reshape(batch, heads, queries, -1).to(query.dtype)


def _with_sums(rows: torch.Tensor, segment: Segment, softcap: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """As `dense.with_sums`, for any codec."""
    scores = products(rows, segment.keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    most = scores.detach().amax(-1, keepdim=True)
    weights = (scores - most).exp_()
    total = weights.sum(-1, keepdim=True)
    return weighted(weights, segment.values) / total, most + total.log()


def observe(
    query: torch.Tensor,
    view: KVView,
    align: Callable[[slice], torch.Tensor | None],
    counted: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Shows the view's watch the weights of the queries that it wants, in blocks: memory is linear in the slots.

    Args:
        align: gives the aligned mask of a part of the queries.
        counted: as `KVView.counted` tells; the others are as for `attend`.
    """
    batch, heads, queries, _ = query.shape
    step = max(BLOCK_ELEMENTS // (batch * heads * view.tokens), 1)
    first = view.watch.first(queries, counted)
    for start in range(first, queries, step):
        part = slice(start, min(start + step, queries))
        weights = _weights(query[:, :, part], view, align(part), scale, softcap, sinks)
        view.watch.take(told(weights, counted, first, part))


def _weights(query, view: KVView, mask, scale: float, softcap, sinks) -> torch.Tensor:
    """The weights of attention, fp32 `[batch, kv_heads, group * queries, slots]`."""
    batch, heads, queries, _ = query.shape
    kv_heads = view.kv_heads
    group = heads // kv_heads
    rows = (query.float() * scale).reshape(batch, kv_heads, group * queries, -1)
    count = rows.shape[2]
    if count % 4 == 3:
        # Products of four rows take less time than those of three.
        rows = torch.nn.functional.pad(rows, (0, 0, 0, 1))
    scores = torch.cat([segment_products(rows, segment) for segment in view.segments], dim=-1)
    scores = scores[:, :, :count]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        masked(scores, by_group(mask, kv_heads, group), group)
    return softmax(scores, sinks, kv_heads, group, queries)


def told(weights: torch.Tensor, counted: torch.Tensor | None, first: int, part: slice) -> torch.Tensor | None:
    """Weights `[batch, n, rows, slots]` of the queries `part` of a forward as a watch is given them: by query, zero for
    those that don't count (`KVView.counted`), without those before `first`. None where none of them counts."""
    queries = part.stop - part.start
    if first >= part.stop:
        return None
    weights = weights.unflatten(2, (-1, queries))
    if counted is not None:
        weights = weights * counted[:, None, None, part, None]
    return weights[..., max(first - part.start, 0) :, :]


def by_group(mask: torch.Tensor, kv_heads: int, group: int) -> torch.Tensor:
    """A mask `[rows, heads or kv_heads or 1, queries, slots]` with the heads of a group in a dimension of their own."""
    return mask.unflatten(1, (kv_heads, group)) if mask.shape[1] == kv_heads * group else mask[:, :, None]


def masked(scores: torch.Tensor, mask: torch.Tensor, group: int) -> None:
    """Applies a mask `[rows, 1 or n, 1 or group, queries, slots]` to scores `[rows, n, group * queries, slots]`."""
    scores = scores.unflatten(2, (group, -1))
    if mask.dtype == torch.bool:
        scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
    else:
        scores.add_(mask)


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None, kv_heads: int, group: int, queries: int) -> torch.Tensor:
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float().reshape(1, kv_heads, group, 1).expand(scores.shape[0], -1, -1, queries)
    extra = extra.reshape(scores.shape[0], kv_heads, group * queries, 1)
    return torch.cat([scores, extra], -1).softmax(-1)[..., :-1]


def _blocks(encoded: Encoded):
    """The encoded tokens in blocks of about `BLOCK_ELEMENTS`: where each starts and stops, and its codes."""
    sample = next(encoded.tensors())
    granule = encoded.codec.granule
    step = max(BLOCK_ELEMENTS // max(sample.shape[0] * sample.shape[1] * encoded.dim * granule, 1), 1) * granule
    for start in range(0, encoded.tokens, step):
        stop = min(start + step, encoded.tokens)
        yield start, stop, encoded.narrow(start, stop - start).codes()


def segment_products(rows: torch.Tensor, segment: Segment) -> torch.Tensor:
    """As `products`; keys that several rows of the batch share are read once for all of them."""
    sharing = segment.sharing
    if sharing is None:
        return products(rows, segment.keys)
    return sharing.apart(products(sharing.together(rows), segment.keys))


def segment_weighted(weights: torch.Tensor, segment: Segment) -> torch.Tensor:
    """As `weighted`, with values that are shared as `segment_products` has keys."""
    sharing = segment.sharing
    if sharing is None:
        return weighted(weights, segment.values)
    return sharing.apart(weighted(sharing.together(weights), segment.values))


def products(rows: torch.Tensor, keys: Encoded) -> torch.Tensor:
    """Rows `[batch, kv_heads, rows, head_dim]` times the keys: fp32 `[batch, kv_heads, rows, tokens]`."""
    rotated, planes, parts = keys.codec.rotate(rows), None, []
    for _, _, codes in _blocks(keys):
        if planes is None:
            planes = to_planes(rotated, codes.shape[0], codes.shape[-1]).contiguous()
        product = _by_head(planes, codes.transpose(-1, -2))
        parts.append(product[0] if len(product) == 1 else product.sum(0))
    scores = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
    _apply_factors(scores, rows, rotated, keys)
    return scores


def _by_head(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y for `[…, kv_heads, n, k]` and `[…, kv_heads or 1, k, m]`: one product with what all heads share."""
    if y.shape[-3] == x.shape[-3]:
        return x @ y
    return (x.flatten(-3, -2)[..., None, :, :] @ y)[..., 0, :, :].unflatten(-2, x.shape[-3:-1])


def _apply_factors(scores: torch.Tensor, rows: torch.Tensor, rotated: torch.Tensor, keys: Encoded) -> None:
    """Makes scores `[batch, kv_heads, rows, tokens]` of the products of rows, `rotated`, with codes."""
    factors = keys.factors()
    if factors.scale is not None:
        scores.mul_(factors.scale)
    if factors.zero is not None:
        scores.addcmul_(rotated.sum(-1, keepdim=True), factors.zero)
    if factors.offset is not None:
        granule = keys.codec.granule
        groups, whole = rotated @ factors.offset.transpose(-1, -2), keys.tokens // granule
        scores[..., : whole * granule].unflatten(-1, (whole, granule)).add_(groups[..., :whole, None])
        scores[..., whole * granule :].add_(groups[..., whole:])
    if factors.sparse is not None:
        slots, more = factors.sparse
        scores.scatter_add_(-1, slots[..., None, :].expand(*rows.shape[:3], -1), rows @ more.transpose(-1, -2))


def weighted(weights: torch.Tensor, values: Encoded) -> torch.Tensor:
    """Weights `[batch, kv_heads, rows, tokens]` times the values: `[batch, kv_heads, rows, value_dim]`, fp32."""
    factors, total = values.factors(), 0
    scaled = weights if factors.scale is None else weights * factors.scale
    for start, stop, codes in _blocks(values):
        total = total + _by_head(scaled[..., start:stop], codes)
    out = from_planes(total, values.dim)
    if factors.zero is not None:
        out = out + (weights * factors.zero).sum(-1, keepdim=True)
    if factors.offset is not None:
        out = out + _by_group(weights, values.codec.granule) @ factors.offset
    out = values.codec.unrotate(out)
    if factors.sparse is not None:
        slots, more = factors.sparse
        out = out + weights.gather(-1, slots[..., None, :].expand(*weights.shape[:3], -1)) @ more
    return out


def _by_group(weights: torch.Tensor, granule: int) -> torch.Tensor:
    """Sums of weights `[batch, kv_heads, rows, tokens]` over groups of tokens: `[batch, kv_heads, rows, groups]`."""
    lacking = -weights.shape[-1] % granule
    if lacking:
        weights = torch.nn.functional.pad(weights, (0, lacking))
    return weights.unflatten(-1, (-1, granule)).sum(-1)
