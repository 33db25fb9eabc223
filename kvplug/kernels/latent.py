"""Latent attention without expansion: the projections that make keys and values of a latent are absorbed into the query
and the output, so that every head attends to the same cached latents.

DeepSeek-AI, "DeepSeek-V2", 2024 (https://arxiv.org/abs/2405.04434), section 2.1. A latent layer caches the latent as
its keys and one rotated key as its values, one head each. Must never repeat either, nor walk over heads in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kvplug.codecs import CODECS
from kvplug.kernels import blocks
from kvplug.view import KVView, Segment, Watch, part_of

# Scores of a block of queries, 256 MiB in fp32.
SCORES = 1 << 26


@dataclass(frozen=True)
class Latents:
    """What an absorbed module hands to its attention function as keys and as values.

    Attributes:
        view: what is cached: latents `[batch, 1, tokens, rank]` as keys, the rotated keys `[batch, 1, tokens,
            rope_dim]` as values.
        up: the weights that make keys without position and values of a latent, `[heads, nope_dim + value_dim, rank]`.
        expand: the model's own way, from latents and rotated keys to keys `[batch, heads, tokens, nope_dim + rope_dim]`
            and values `[batch, heads, tokens, value_dim]`.
        plain: the cached tensors, where the model's own attention function could read them; None for a handle.
    """

    view: KVView
    up: torch.Tensor
    expand: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    plain: tuple[torch.Tensor, torch.Tensor] | None = None

    def pays(self, query: torch.Tensor) -> bool:
        """Whether the queries `[batch, heads, queries, nope_dim + rope_dim]` take fewer multiplications on the latents
        than on keys and values that would first have to be made of them; never where a gradient is wanted."""
        if torch.is_grad_enabled() and (query.requires_grad or self.up.requires_grad):
            return False
        queries, rope = query.shape[2], self.view.segments[-1].values.dim
        made, rank = self.up.shape[1:]
        # For one head and one cached token: scores and output, and what is made of the latent.
        return queries * (2 * rank + rope) < rank * made + queries * (made + rope)

    def over(self, queries: int) -> KVView:
        """The view as the queries of this forward have it."""
        return replace(self.view, queries=queries) if self.plain is not None else self.view

    def expanded(self) -> tuple[torch.Tensor | None, torch.Tensor | None, KVView | None]:
        """Keys and values of all heads: as tensors, where the cache is one, else as a view over the same slots."""
        if self.plain is not None:
            return *self.expand(*self.plain), None
        return None, None, expanded(self.view, self.expand)


def expanded(view: KVView, expand: Callable) -> KVView:
    """A view over the keys and values that `expand` makes of a view's latents, in the same slots."""
    spread = view.spread()
    dense = CODECS["dense"]
    keys, values = (dense.encode(x) for x in expand(spread.keys(), spread.values()))
    positions = None if spread.in_order else spread.positions()
    watch = None
    if view.watch is not None:
        watch = Watch(view.watch.queries, lambda weights: _show(weights.transpose(1, 2), view))
    return replace(view, segments=[Segment(keys, values, positions=positions)], watch=watch)


def attend(
    query: torch.Tensor,
    view: KVView,
    up: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `reference.attend` gives over `expanded(view, …)`, the output alone, `[batch, heads, queries, value_dim]`.

    Args:
        query: `[batch, heads, queries, nope_dim + rope_dim]`, the rotated part last.
        view, up: as in `Latents`; the view's watch is shown the weights, all heads as one group.
        mask, scale, softcap, sinks: as for `reference.attend`.
    """
    batch, heads, queries, _ = query.shape
    step = max(SCORES // (batch * heads * view.tokens), 1)
    counted = None if view.watch is None else view.counted(mask, view.tokens)
    first = queries if view.watch is None else view.watch.first(queries, counted)
    out = []
    for start in range(0, queries, step):
        part = slice(start, min(start + step, queries))
        shown = (counted, first, part)
        out.append(_attend(query[:, :, part], view, up, part_of(mask, part), scale, softcap, sinks, shown))
    return out[0] if len(out) == 1 else torch.cat(out, dim=2)


def _attend(query, view: KVView, up, mask, scale: float, softcap, sinks, shown: tuple) -> torch.Tensor:
    counted, first, part = shown
    batch, heads, queries, width = query.shape
    nope = width - view.segments[-1].values.dim
    parts = (_by_head(query[..., :nope], up[:, :nope]), query[..., nope:])
    latent, rotated = ((x.float() * scale).reshape(batch, 1, heads * queries, -1) for x in parts)
    # Of the kernels over blocks the first reads a segment's keys and the second its values.
    turned = [replace(segment, keys=segment.values, values=segment.keys) for segment in view.segments]
    scores = [
        blocks.segment_products(latent, own).add_(blocks.segment_products(rotated, other))
        for own, other in zip(view.segments, turned, strict=True)
    ]
    scores = scores[0] if len(scores) == 1 else torch.cat(scores, dim=-1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        blocks.masked(scores, blocks.by_group(mask, 1, heads), heads)
    weights = blocks.softmax(scores, sinks, 1, heads, queries)
    if view.watch is not None:
        told = blocks.told(weights, counted, first, part)
        if told is not None:
            _show(told, view)
    sizes = [segment.tokens for segment in view.segments]
    out = sum(blocks.segment_weighted(x, s) for x, s in zip(weights.split(sizes, dim=-1), turned, strict=True))
    out = out.reshape(batch, heads, queries, -1).to(query.dtype)
    return _by_head(out, up[:, nope:].transpose(1, 2))


def _by_head(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, queries, n]` times `[heads, n, m]`, which is not repeated for the rows of the batch."""
    batch, heads, queries, _ = x.shape
    product = x.transpose(0, 1).reshape(heads, batch * queries, -1) @ weight
    return product.unflatten(1, (batch, queries)).transpose(0, 1)


def _show(weights: torch.Tensor, view: KVView) -> None:
    """Shows a view's watch weights `[batch, 1, group, queries, slots]`; by page first where slots have owners."""
    owners = view.segments[0].owners
    if owners is None:
        view.watch.take(weights)
        return
    shared = view.segments[0].tokens
    pages = weights[..., :shared].unflatten(-1, (owners.shape[1], -1))[:, 0]
    view.watch.take(pages.permute(0, 3, 1, 2, 4), weights[..., shared:])
