"""Attention over slots that the heads of a layer share (`Segment.owners`), straight from the encoded bytes.

A page of slots belongs to one head: the head's queries are multiplied with each of its pages, and what the pages of a
head give is put together by the maxima and sums of their softmax. Must never walk over heads or pages in Python.
"""

from __future__ import annotations

import torch

from kvplug.codecs import Encoded
from kvplug.kernels.blocks import BLOCK_ELEMENTS, by_group, masked, products, told, weighted
from kvplug.view import KVView, part_of

# Scores of a block of queries, 32 MiB in fp32.
SCORES = 4 * BLOCK_ELEMENTS


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `reference.attend` over `view.spread()`, the output alone; the first segment is the one that heads share, the
    view's watch is shown the weights of its pages and of the other tokens. Memory is linear in the slots."""
    batch, heads, queries, _ = query.shape
    kv_heads = view.kv_heads
    each = batch * heads // kv_heads * (view.segments[0].tokens + kv_heads * sum(s.tokens for s in view.segments[1:]))
    step = max(SCORES // each, 1)
    counted = None if view.watch is None else view.counted(mask, view.tokens)
    first = queries if view.watch is None else view.watch.first(queries, counted)
    out = []
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        shown = (counted, first, part)
        out.append(_attend(query[:, :, part], view, part_of(mask, part), scale, softcap, sinks, shown))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _attend(query, view: KVView, mask, scale: float, softcap, sinks, shown: tuple) -> torch.Tensor:
    counted, first, part = shown
    batch, heads, queries, _ = query.shape
    shared, rest = view.segments[0], view.segments[1:]
    kv_heads = view.kv_heads
    group = heads // kv_heads
    rows = (query.float() * scale).reshape(batch, kv_heads, group * queries, -1)
    owners = shared.owners.long().clamp(max=kv_heads - 1)
    pages, page = owners.shape[1], shared.tokens // owners.shape[1]
    keys, values = (_by_page(side, page) for side in (shared.keys, shared.values))

    # Scores `[batch, pages, rows, page]` and `[batch, kv_heads, rows, tokens]`.
    there = _to_pages(rows, owners).flatten(0, 1)[:, None]
    scores = [products(there, keys)[:, 0].unflatten(0, (batch, pages)), *(products(rows, s.keys) for s in rest)]
    if softcap is not None:
        scores = [softcap * torch.tanh(x / softcap) for x in scores]
    masks = [None] * len(scores) if mask is None else mask.split([s.tokens for s in view.segments], dim=-1)
    if mask is not None:
        masked(scores[0], _mask_by_page(masks[0], owners, kv_heads, group), group)
        for x, one in zip(scores[1:], masks[1:], strict=True):
            masked(x, by_group(one, kv_heads, group), group)

    # The softmax over all of a head's pages and tokens, `[batch, kv_heads, rows]`.
    where = owners[..., None].expand(-1, -1, rows.shape[2])
    top = torch.stack([x.amax(-1) for x in scores[1:]]).amax(0)
    top = top.scatter_reduce(1, where, scores[0].amax(-1), "amax")
    if sinks is not None:
        sink = sinks.float().reshape(1, kv_heads, group, 1).expand(batch, -1, -1, queries).reshape(top.shape)
        top = torch.maximum(top, sink)
    weights = [(scores[0] - top.gather(1, where)[..., None]).exp_()]
    weights += [(x - top[..., None]).exp_() for x in scores[1:]]
    total = sum(x.sum(-1) for x in weights[1:]).scatter_add(1, where, weights[0].sum(-1))
    if sinks is not None:
        total = total + (sink - top).exp()
    weights[0] /= total.gather(1, where)[..., None]
    for x in weights[1:]:
        x /= total[..., None]
    if view.watch is not None and first < part.stop:
        view.watch.take(*(told(x, counted, first, part) for x in weights))

    out = weighted(weights[0].flatten(0, 1)[:, None], values)[:, 0].unflatten(0, (batch, pages))
    rest_out = sum(weighted(x, s.values) for x, s in zip(weights[1:], rest, strict=True))
    out = rest_out.scatter_add(1, where[..., None].expand_as(out), out)
    return out.reshape(batch, heads, queries, -1).to(query.dtype)


def _by_page(side: Encoded, page: int) -> Encoded:
    """Fields `[batch, 1, slots, width]` as `[batch * pages, 1, page, width]`."""
    fields = {name: x.unflatten(2, (-1, page)).flatten(0, 2)[:, None] for name, x in side.fields.items()}
    return Encoded(side.codec, fields, side.dim)


def _to_pages(rows: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
    """What belongs to each page's head: `[batch, kv_heads, …]` to `[batch, pages, …]`."""
    index = owners.reshape(*owners.shape, *[1] * (rows.ndim - 2)).expand(-1, -1, *rows.shape[2:])
    return rows.gather(1, index)


def _mask_by_page(mask: torch.Tensor, owners: torch.Tensor, kv_heads: int, group: int) -> torch.Tensor:
    """A mask `[rows, heads or 1, queries, slots]` as `[batch, pages, group or 1, queries, page]`."""
    batch, pages = owners.shape
    queries = mask.shape[2]
    mask = mask.unflatten(-1, (pages, -1)).expand(batch, -1, -1, -1, -1)
    if mask.shape[1] == 1:
        return mask.permute(0, 3, 1, 2, 4)
    # Of each page the part of its own head: `[batch, pages, kv_heads, group, queries, page]`.
    mask = mask.unflatten(1, (kv_heads, group)).permute(0, 4, 1, 2, 3, 5)
    index = owners[:, :, None, None, None, None].expand(-1, -1, 1, group, queries, mask.shape[-1])
    return mask.gather(2, index)[:, :, 0]
