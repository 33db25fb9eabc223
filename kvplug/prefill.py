"""A prompt is run once, in pieces if it is long, and then shared by as many rows as are to go on from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from tqdm import tqdm

from kvplug import compat
from kvplug.cache import KVCache
from kvplug.padding import check_left_padding, check_prompts
from kvplug.policies.positional import check_count


@torch.no_grad()
def prefill(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    cache: KVCache,
    rows: int = 1,
    chunk: int | None = None,
    attention_mask: torch.Tensor | None = None,
    progress: bool = False,
) -> KVCache:
    """Runs all but the last token of each prompt, and then lets `rows` rows go on from each of them.

    `model.generate(input_ids, past_key_values=cache, num_beams=rows)`, or `num_return_sequences=rows`, goes on from
    there; by itself it would run the prompt once for each row. In a `PagedCache` the rows share the prompt's pages.

    Args:
        model: a causal language model of transformers.
        input_ids: `[batch, tokens]`, the whole prompts; what the cache has seen of them is not run again.
        cache: empty, or holding the beginning of these prompts.
        rows: how many rows go on from each prompt, one after the other.
        chunk: tokens that are run at a time, None for all; under an evicting policy what a chunk sees is what the
            policy kept of those before it, so its text may differ. Not with a budget that is a share of the prompt.
        attention_mask: `[batch, tokens]`, 0 for padding, which is on the left.
        progress: shows a bar over the tokens.

    Returns:
        The cache.

    Raises:
        ValueError: an argument is not valid; the cache stays as it was.
    """
    seen = _check(input_ids, cache, rows, chunk, attention_mask)
    takes = _takes(model)
    argument = compat.cache_argument(model)
    positions = None
    if attention_mask is not None:
        positions = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    end = input_ids.shape[1] - 1
    with tqdm(total=end, initial=seen, unit="token", disable=not progress, desc="prefill") as bar:
        for start in range(seen, end, chunk or max(end, 1)):
            stop = min(start + chunk, end) if chunk else end
            more: dict[str, object] = {argument: cache, "use_cache": True}
            if attention_mask is not None:
                more["attention_mask"] = attention_mask[:, :stop]
                if takes("position_ids"):
                    more["position_ids"] = positions[:, start:stop]
            if takes("logits_to_keep"):
                more["logits_to_keep"] = 1
            model(input_ids[:, start:stop], **more)
            bar.update(stop - start)
    if rows > 1:
        # Not `batch_repeat_interleave`, which layers of linear attention lack.
        cache.reorder_cache(torch.arange(len(input_ids), device=input_ids.device).repeat_interleave(rows))
    return cache


def _takes(model: torch.nn.Module) -> Callable[[str], bool]:
    """Tells whether a model's forward takes an argument; one that hands on what it is given is looked through."""
    known = inspect.signature(model.forward).parameters
    inner = getattr(model, "_orig_mod", None) or getattr(model, "base_model", None)
    if "input_ids" not in known and isinstance(inner, torch.nn.Module) and inner is not model:
        return _takes(inner)
    return lambda name: name in known


def _check(input_ids, cache, rows: int, chunk: int | None, attention_mask) -> int:
    """The number of tokens that the cache has seen."""
    check_prompts(input_ids)
    if not isinstance(cache, KVCache):
        raise ValueError(f"cache={type(cache).__name__} is not accepted; a cache of kvplug is")
    check_count("rows", rows, 1)
    if chunk is not None:
        check_count("chunk", chunk, 1)
    if attention_mask is not None:
        check_left_padding(attention_mask, input_ids)
    if chunk is not None and chunk < input_ids.shape[1] - 1:
        for layer in cache.layers:
            if isinstance(budget := getattr(getattr(layer, "policy", None), "budget", None), float):
                raise ValueError(
                    f"chunk={chunk!r} can't be had with budget={budget}: a share is one of the cache's first forward, "
                    "which would be the first chunk; None is accepted, or a budget in tokens"
                )
    seen = cache.get_seq_length()
    if seen >= input_ids.shape[1]:
        raise ValueError(
            f"input_ids has {input_ids.shape[1]} tokens, and the cache has seen {seen}: it must have at least one that "
            "was not seen; pass the whole prompts"
        )
    batch = next((layer.batch for layer in cache.layers if getattr(layer, "batch", 0)), 0)
    if seen and batch and batch != len(input_ids):
        raise ValueError(f"input_ids has {len(input_ids)} rows, and the cache has {batch}; as many are accepted")
    return seen
