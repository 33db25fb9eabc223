"""The only place that asks which transformers this is, and that knows where its versions differ.

Supported: transformers 5.17 up to the newest 5.x.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationMixin, PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

__all__ = [
    "ASSISTED_DECODING_ASKS",
    "AttentionInterface",
    "AttentionMaskInterface",
    "Cache",
    "CacheLayerMixin",
    "attention_function",
    "cache_argument",
    "can_route",
    "default_layers",
    "hands_over_latents",
    "is_checkpointing",
    "is_full_attention",
    "is_linear",
    "is_never_written",
    "is_sliding",
    "kv_shape",
    "mask_function",
    "readers",
    "text_config",
]


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The decoder's part of a config; of an encoder-decoder's flat config transformers gives a copy."""
    return config.get_text_config(decoder=True)


def default_layers(config: PreTrainedConfig) -> list:
    """The cache layers that transformers itself would use for the model."""
    return DynamicCache(config=config).layers


def is_full_attention(layer: object) -> bool:
    """Whether a default layer keeps all keys and values and nothing else."""
    return type(layer) is DynamicLayer


def is_sliding(layer: object) -> bool:
    """Whether a default layer keeps a sliding window as views of what it was given."""
    return type(layer) is DynamicSlidingWindowLayer


def is_linear(layer: object) -> bool:
    """Whether a default layer keeps states of a fixed size, for linear attention or a convolution."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


# Older versions have no such class: there the list of layers ends before those that borrow.
_NEVER_WRITTEN = getattr(cache_utils, "DummyLayer", ())


def is_never_written(layer: object) -> bool:
    """Whether a default layer stands for one without attention, or for one that reads the cache of another."""
    return isinstance(layer, _NEVER_WRITTEN)


def cache_argument(model: torch.nn.Module) -> str:
    """How the model's forward calls the cache: `cache` where it knows that name, as older models do not."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _own_config(config: PreTrainedConfig, layer_idx: int) -> PreTrainedConfig:
    layers = getattr(config, "per_layer_config", None)
    return layers[layer_idx] if layers is not None else config


def hands_over_latents(config: PreTrainedConfig, layer_idx: int) -> bool:
    """Whether a layer's config is that of latent attention, which caches the latent and one rotated key."""
    own = _own_config(config, layer_idx)
    return bool(getattr(own, "kv_lora_rank", None) and getattr(own, "qk_rope_head_dim", None))


def kv_shape(config: PreTrainedConfig, layer_idx: int) -> tuple[int, int, int]:
    """Key-value heads, key width and value width of what a layer hands to the cache, as far as a config tells."""
    own = _own_config(config, layer_idx)
    if hands_over_latents(config, layer_idx):
        # Latent attention hands over the compressed latent and the rotated key, as one head.
        return 1, own.kv_lora_rank, own.qk_rope_head_dim
    heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
    dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return heads, dim, dim


def readers(config: PreTrainedConfig) -> dict[int, int]:
    """How many layers the model itself hands the keys and values of another one to, by that one's index.

    They attend to what the cache's `update` returned for it, and never call `update`.
    """
    text = text_config(config)
    kinds, borrowing = getattr(text, "layer_types", None), getattr(text, "num_kv_shared_layers", 0)
    if not kinds or not borrowing:
        return {}
    own = kinds[: len(kinds) - borrowing]
    found: dict[int, int] = {}
    for kind in kinds[len(own) :]:
        if kind in own:
            owner = len(own) - 1 - own[::-1].index(kind)
            found[owner] = found.get(owner, 0) + 1
    return found


# Whether assisted decoding asks `is_croppable` before it relies on cropping (5.17 goes on without asking).
ASSISTED_DECODING_ASKS = "is_croppable" in GenerationMixin._assisted_decoding.__code__.co_names


def is_checkpointing(model_or_config: object) -> bool:
    """Whether a model drops activations and computes them again for its gradients; False for a config."""
    for name in ("is_activation_checkpointing", "is_gradient_checkpointing"):
        if hasattr(model_or_config, name):
            return bool(getattr(model_or_config, name))
    return False


def can_route(model_or_config: torch.nn.Module | PreTrainedConfig) -> bool:
    """Whether a model's attention goes through the registered functions; True where a config tells nothing."""
    if isinstance(model_or_config, torch.nn.Module):
        if any(getattr(module, "indexer", None) is not None for module in model_or_config.modules()):
            # Sparse attention masks what its indexer did not pick under the names of transformers' functions alone.
            return False
        return bool(model_or_config._can_set_attn_implementation())
    kind = AutoModelForCausalLM._model_mapping.get(type(model_or_config), None)
    return not isinstance(kind, type) or bool(kind._can_set_attn_implementation())


def attention_function(name: str, module: torch.nn.Module) -> Callable:
    """The attention function that transformers would use for `module` under the implementation `name`."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def mask_function(name: str) -> Callable:
    """The function that makes the masks for the implementation `name`."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name]
