"""Attention over a view in plain torch: the truth that every faster path is held to.

Nothing here is fast: everything is decoded, heads are repeated, all in fp32.
"""

from __future__ import annotations

import torch

from kvplug.view import KVView


def attend(
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of the queries over the slots of a view.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        view: what is stored, for `kv_heads` heads, each shared by `heads // kv_heads` query heads.
        mask: aligned with the slots (see `KVView.align`), boolean or additive, or None.
        scale: factor on the scores.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: one learned logit a query head, `[heads]`, that takes its share of the softmax (GPT-OSS).

    Returns:
        The output `[batch, heads, queries, value_dim]` and the weights `[batch, heads, queries, slots]`, as query's
        dtype.
    """
    heads = query.shape[1]
    keys, values = view.keys().float(), view.values().float()
    group = heads // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        if 1 < mask.shape[1] < heads:
            mask = mask.repeat_interleave(group, 1)
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.float()
    if sinks is not None:
        extra = sinks.float().reshape(1, heads, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).to(query.dtype), weights.to(query.dtype)
