"""Which tokens of a forward are padding, told from its mask: those that no query sees."""

from __future__ import annotations

import weakref

import torch


def visible(mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Which of the tokens `start : stop` any query sees, bool `[rows, tokens]`, from a mask of 2 or 4 dimensions."""
    columns = mask[..., start:stop]
    if mask.ndim == 2:
        return columns.bool()
    seen = columns if columns.dtype == torch.bool else columns > torch.finfo(columns.dtype).min / 2
    return seen[:, 0].any(dim=1)


def visible_since(earlier: torch.Tensor | None, mask: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """As `visible`, where `earlier` masks told of the first of the tokens: what any of them let a query see is seen."""
    real = visible(mask, start, stop)
    if earlier is None:
        return real
    known = earlier.shape[1]
    return torch.cat([real[:, :known] | earlier, real[:, known:]], dim=1)


# The mask of the last forward and what was read from it: all layers of a forward are given the same one.
_last_mask: tuple = (None, None, False)


def nothing_hidden(mask: torch.Tensor, start: int, stop: int) -> bool:
    """Whether `visible` holds for all tokens; a mask is read once a forward, not once a layer."""
    global _last_mask
    known, key, answer = _last_mask
    version = None if mask.is_inference() else mask._version
    if known is None or known() is not mask or key != (start, stop, version):
        answer = bool(visible(mask, start, stop).all())
        _last_mask = (weakref.ref(mask), (start, stop, version), answer)
    return answer


def check_prompts(input_ids: object) -> None:
    """Raises ValueError where something is not token numbers `[batch, tokens]`, at least one each."""
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2 or 0 in input_ids.shape:
        shape = tuple(input_ids.shape) if isinstance(input_ids, torch.Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids={shape} is not accepted; token numbers [batch, tokens], at least 1 each, are")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise ValueError(f"input_ids of {input_ids.dtype} are not accepted; token numbers are")


def check_left_padding(attention_mask: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """Where a mask for prompts hides tokens, bool `[batch, tokens]`.

    Raises:
        ValueError: it is no mask of the prompts' shape, or hides tokens that others come before.
    """
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
    if shape != tuple(input_ids.shape):
        raise ValueError(
            f"attention_mask={shape} is not accepted; a mask of input_ids' shape, {tuple(input_ids.shape)}, is"
        )
    hidden = attention_mask == 0
    if bool((hidden[:, 1:] & ~hidden[:, :-1]).any()):
        raise ValueError("attention_mask hides tokens that others come before; padding on the left is accepted")
    return hidden
