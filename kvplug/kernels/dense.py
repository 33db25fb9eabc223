"""Attention for many queries: one layer is decoded for the moment and torch's own attention runs over it.

With many queries arithmetic is the bound, so decoding once costs little beside it. Keys and values are never repeated
for grouped queries: the queries of a group become rows.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvplug.codecs import Plain
from kvplug.view import KVView, Segment

# What torch's own attention uses on a CPU; it also tells the sums that the softmax divided by.
_FUSED = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


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


def with_sums(rows: torch.Tensor, segment: Segment) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention of fp32 rows `[batch, kv_heads, rows, head_dim]`, scaled, over a segment that is all seen.

    Returns:
        The output `[batch, kv_heads, rows, head_dim]` and the logarithm of the sum of the scores' exponentials,
        `[batch, kv_heads, rows, 1]`; None where torch has no such kernel for the segment.
    """
    keys, values = segment.keys, segment.values
    plain = isinstance(keys.codec, Plain) and isinstance(values.codec, Plain)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (rows, *keys.tensors(), *values.tensors())):
        # The sums that it tells have no gradient.
        return None
    if _FUSED is None or not plain or rows.device.type != "cpu" or keys.dim != values.dim:
        return None
    keys, values = keys.fields["codes"], values.fields["codes"]
    if not keys.dtype == values.dtype == rows.dtype or not keys.stride(-1) == values.stride(-1) == 1:
        return None
    out, total = _FUSED(rows, keys, values, scale=1.0)
    return out, total[..., None]
