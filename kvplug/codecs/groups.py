"""Groups of consecutive tokens: what codecs with a row for each group share.

Must never read past the tokens that are there: the last group may be short.
"""

from __future__ import annotations

import torch


def check_group_size(group_size: int | None, optional: bool = False) -> None:
    """Raises ValueError where `group_size` is not a whole number from 1 (or None, if `optional`)."""
    if group_size is None and optional:
        return
    if isinstance(group_size, bool) or not isinstance(group_size, int) or group_size < 1:
        accepted = "a whole number from 1" + (", or None" if optional else "")
        raise ValueError(f"group_size={group_size!r} is not accepted; use {accepted}")


def in_groups(x: torch.Tensor, group_size: int) -> list[torch.Tensor]:
    """Views of x `[batch, kv_heads, tokens, dim]` as `[batch, kv_heads, groups, tokens of a group, dim]`: the whole
    groups, and then the last one where it is short."""
    tokens = x.shape[2]
    whole = tokens // group_size * group_size
    found = [x[:, :, :whole].unflatten(2, (whole // group_size, group_size))]
    return found if whole == tokens else [*found, x[:, :, None, whole:]]


def rows_in_groups(rows: torch.Tensor, group_size: int, tokens: int) -> list[torch.Tensor]:
    """Rows `[batch, kv_heads, groups, dim]` in the parts that `in_groups` makes of `tokens` tokens."""
    whole = tokens // group_size
    return [rows[:, :, :whole]] if rows.shape[2] == whole else [rows[:, :, :whole], rows[:, :, whole:]]


def group_mean(x: torch.Tensor, group_size: int) -> torch.Tensor:
    """Means of x `[batch, kv_heads, tokens, dim]` over groups of tokens: `[batch, kv_heads, groups, dim]`."""
    means = [part.mean(3) for part in in_groups(x, group_size)]
    return means[0] if len(means) == 1 else torch.cat(means, dim=2)


def spread(rows: torch.Tensor, group_size: int, tokens: int) -> torch.Tensor:
    """The row of each token's group: `[batch, kv_heads, groups, dim]` → `[batch, kv_heads, tokens, dim]`."""
    return rows.repeat_interleave(group_size, dim=2)[:, :, :tokens]
