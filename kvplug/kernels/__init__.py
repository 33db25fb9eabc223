"""Attention over a view: one dispatcher over the paths, which all give what `reference` gives."""

from __future__ import annotations

import torch

from kvplug.kernels import blocks, dense, heads, latent, reference
from kvplug.view import KVView, part_of

__all__ = ["attend", "blocks", "dense", "heads", "latent", "reference"]

# Query rows a key-value head up to which reading the bytes is the bound, so that decoding at large does not pay.
FEW_ROWS = 64


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Softmax attention over a view, `[batch, heads, queries, value_dim]`; arguments as for `reference.attend`."""
    if view.segments[0].owners is not None:
        return heads.attend(query, view, mask, scale, softcap, sinks)
    rows = query.shape[1] // view.kv_heads * query.shape[2]
    special = softcap is not None or sinks is not None
    # A run of tokens in full precision needs no decoding, so torch's own attention reads it in place.
    if special or (rows <= FEW_ROWS and not view.plain):
        return blocks.attend(query, view, mask, scale, softcap, sinks)
    if view.watch is not None:
        blocks.observe(query, view, lambda part: part_of(mask, part), view.counted(mask, view.tokens), scale)
    return dense.attend(query, view, mask, scale)
