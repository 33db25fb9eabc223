"""The attention and mask functions registered as "kvplug", and how a model is routed through them.

Without one of our caches in the call both are the functions that the model had before: same mask, same kernel.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from kvplug import compat, kernels
from kvplug.kernels.latent import Latents
from kvplug.view import KVTensor, KVView, plain_view, view_of

NAME = "kvplug"
ROUTABLE = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4")


class Routed(str):
    """The name "kvplug" as an attention implementation, which remembers the one that it replaced.

    A string in all respects, so it travels with the config through copies and pickles and needs no registry.
    """

    previous: str

    def __new__(cls, name: str = NAME, previous: str = "sdpa") -> Routed:
        routed = super().__new__(cls, name)
        routed.previous = previous
        return routed

    def __getnewargs__(self):
        return str(self), self.previous


def _previous(config: PreTrainedConfig | None) -> str:
    """What the model would use without kvplug; a model that was loaded with "kvplug" by name has sdpa."""
    return getattr(getattr(config, "_attn_implementation", None), "previous", "sdpa")


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention for models routed through kvplug.

    Args:
        query: `[batch, heads, queries, head_dim]`.
        key, value: handles of a cache's view, or plain tensors `[batch, kv_heads, tokens, head_dim]`; twice the same
            `Latents` from a module that `kvplug.absorb` has changed.
        attention_mask: the full logical mask, whatever was evicted.

    Returns:
        The output `[batch, queries, heads, head_dim]`, and the weights where the model's own function gives them.
    """
    if kwargs.get("indices") is not None or kwargs.get("block_indices") is not None:
        raise ValueError(
            f"{type(module).__name__} picks by itself which tokens it reads (sparse attention), which can't be routed "
            "through kvplug; call kvplug.detach(model), and build caches from the model rather than its config"
        )
    name = _previous(getattr(module, "config", None))
    special = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    foreign = bool(dropout) or kwargs.get("position_bias") is not None
    if isinstance(key, Latents):
        if not foreign and key.pays(query):
            return _attend_latents(module, query, key, attention_mask, scaling, kwargs), None
        key, value, view = key.expanded()
    else:
        view = view_of(key, value)
    if view is not None and view.queries != query.shape[2]:
        # A model may ask for its last tokens alone from some layer on.
        view = replace(view, queries=query.shape[2])
    if view is None and name == "sdpa" and query.shape[2] == 1 and not special and not foreign:
        # For one query of a group of heads sdpa would read the keys once a head.
        view = plain_view(key, value)
        ours = view is not None
    elif view is None:
        ours = False
    elif foreign:
        if view.evicting and not view.plain:
            extra = "dropout" if dropout else "position_bias"
            raise ValueError(f"{extra} is not supported over a cache that evicts tokens; use DenseCache or QuantCache")
        ours = False
    else:
        # The model's own function takes a first forward as it is; sdpa can't soft-cap or use learned sinks.
        ours = not view.plain or view.queries < view.seen or (name == "sdpa" and special)
    if ours:
        out = _attend(module, query, view, attention_mask, scaling, kwargs), None
    else:
        if view is None:
            key, value = (x.decoded() if isinstance(x, KVTensor) else x for x in (key, value))
        else:
            key, value = view.in_time("keys"), view.in_time("values")
        mask, positions = attention_mask, kwargs.get("position_ids")
        sliced = positions is not None and 1 < query.shape[2] < positions.shape[-1]
        if mask is None and sliced and name == "sdpa" and _causal(module, kwargs):
            # Queries of the last tokens alone, which sdpa would take for those of the first ones.
            mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
            mask = mask.tril(positions.shape[-1] - query.shape[2])
        out = compat.attention_function(name, module)(
            module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
        )
        if view is not None and view.watch is not None:
            causal, counted = _causal(module, kwargs), view.counted(attention_mask, view.seen)
            kernels.blocks.observe(
                query,
                view,
                lambda part: view.align(attention_mask, causal, part),
                counted,
                **_more(query, scaling, kwargs),
            )
    # Of keys that carry gradients the view is not shown.
    done = getattr(key, "kvplug_done", None) if view is None else view.done
    if done is not None:
        done(query, attention_mask)
    return out


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    view: KVView,
    mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict,
) -> torch.Tensor:
    out = kernels.attend(query, view, view.align(mask, _causal(module, kwargs)), **_more(query, scaling, kwargs))
    return out.transpose(1, 2).contiguous()


def _attend_latents(
    module: torch.nn.Module,
    query: torch.Tensor,
    latents: Latents,
    mask: torch.Tensor | None,
    scaling: float | None,
    kwargs: dict,
) -> torch.Tensor:
    view = latents.over(query.shape[2])
    aligned = view.align(mask, _causal(module, kwargs))
    out = kernels.latent.attend(query, view, latents.up, aligned, **_more(query, scaling, kwargs))
    view.done(query, mask)
    return out.transpose(1, 2).contiguous()


def _causal(module: torch.nn.Module, kwargs: dict) -> bool:
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def _more(query: torch.Tensor, scaling: float | None, kwargs: dict) -> dict:
    """What the kernels are told beside query, view and mask."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return {"scale": scale, "softcap": kwargs.get("softcap"), "sinks": kwargs.get("s_aux")}


def mask_forward(*args, config: PreTrainedConfig | None = None, **kwargs):
    """The mask function of "kvplug": the mask that the model would have had."""
    return compat.mask_function(_previous(config))(*args, config=config, **kwargs)


def register() -> None:
    """Registers both functions with transformers under the name "kvplug"."""
    compat.AttentionInterface.register(NAME, attention_forward)
    compat.AttentionMaskInterface.register(NAME, mask_forward)


def configs_of(model_or_config: object) -> list[PreTrainedConfig]:
    """The config objects that a text decoder's attention layers read.

    Raises:
        ValueError: it is neither a model nor a config of transformers.
    """
    if isinstance(model_or_config, PreTrainedConfig):
        text = compat.text_config(model_or_config)
        # Of a flat encoder-decoder config `text` is a copy; its layers read the config itself.
        return [text if text is model_or_config or _holds(model_or_config, text) else model_or_config]
    config = getattr(model_or_config, "config", None)
    if not isinstance(config, PreTrainedConfig) or not isinstance(model_or_config, torch.nn.Module):
        raise ValueError(
            f"config={type(model_or_config).__name__} is not accepted; pass a transformers model or its config"
        )
    text = configs_of(config)[0]
    found = {id(text): text}
    for module in model_or_config.modules():
        own = getattr(module, "config", None)
        # Some models give their decoder a copy of the config.
        if type(own) is type(text):
            found.setdefault(id(own), own)
    return list(found.values())


def _holds(config: PreTrainedConfig, part: PreTrainedConfig) -> bool:
    return any(value is part for value in vars(config).values())


def attach(model_or_config: object) -> None:
    """Routes a model's attention through kvplug; a model that is routed stays as it is.

    Raises:
        ValueError: the attention implementation can't be routed; names it and what is accepted.
    """
    configs = configs_of(model_or_config)
    if not compat.can_route(model_or_config):
        # Its own code may look at the name and take another way.
        raise ValueError(
            f"{type(model_or_config).__name__} has its own attention code, which can't be routed through kvplug; a "
            "model whose attention goes through transformers' attention functions is accepted"
        )
    for config in configs:
        name = config._attn_implementation
        if name is not None and name != NAME and name not in ROUTABLE:
            raise ValueError(
                f"attn_implementation={name!r} can't be routed through kvplug; use one of {', '.join(ROUTABLE)}"
            )
    for config in configs:
        name = config._attn_implementation
        # A config without a model yet has no implementation to replace.
        if name is not None and name != NAME:
            config._attn_implementation_internal = Routed(previous=copy.copy(name))


def detach(model_or_config: object) -> None:
    """Gives a model back the attention that it had before `attach`."""
    for config in configs_of(model_or_config):
        if config._attn_implementation == NAME:
            config._attn_implementation_internal = _previous(config)
