"""Attention for many queries: one layer is decoded for the moment and torch's own attention runs over it.

With many queries arithmetic is the bound, so decoding once costs little beside it. Keys and values are never repeated
for grouped queries: the queries of a group become rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvplug.view import KVView


def attend(query: torch.Tensor, view: KVView, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """As `reference.attend`, the output alone, in query's dtype; no softcap and no learned sinks."""
    batch, heads, queries, dim = query.shape
    keys, values = view.keys().to(query.dtype), view.values().to(query.dtype)
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    rows = query.reshape(batch, kv_heads, group * queries, dim)
    if mask is not None:
        per_head = mask.shape[1] == heads and group > 1
        if per_head:
            mask = mask.reshape(mask.shape[0], kv_heads, group * queries, -1)
        elif group > 1:
            mask = mask.repeat(1, 1, group, 1)
        if mask.dtype == torch.bool:
            # Rows that see nothing (padding) get the mean of the values instead of NaN.
            mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(
                ~mask, torch.finfo(query.dtype).min
            )
        else:
            mask = mask.to(query.dtype)
    out = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, queries, -1)
