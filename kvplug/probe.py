"""What each layer of a model hands to its cache, read from a forward on the `meta` device, where nothing is allocated.

Configs do not tell it in one way: families differ in heads, widths, dtypes and states. Must never touch the config or
the model that it is asked about.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from dataclasses import dataclass

import torch
from transformers import AutoModel, DynamicCache, EncoderDecoderCache, PreTrainedConfig

from kvplug import compat


@dataclass(frozen=True)
class Shape:
    """A tensor of one row, without its batch and token dimensions where it has them."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Handed:
    """What one layer hands to its cache.

    Attributes:
        keys, values: sizes are `(kv_heads, width)`; None for a layer without keys and values.
        states: by attribute and number; sizes are those of one row.
    """

    keys: Shape | None = None
    values: Shape | None = None
    states: tuple[tuple[str, int, Shape], ...] = ()


@dataclass(frozen=True)
class Probe:
    """What was learnt of a model: a `Handed` for each layer, None where it could not be read.

    `routable` says whether the model's attention can be routed through kvplug, None where that is not known.
    """

    layers: tuple[Handed | None, ...]
    routable: bool | None


# By class, contents and dtype of the config: an operator asks about one model many times.
_known: dict[tuple, Probe] = {}


def probe(config: PreTrainedConfig, dtype: torch.dtype) -> Probe:
    """Builds the model of a text config without memory, runs it over one token, and reads what its cache got.

    Args:
        config: a text model's; not changed.
        dtype: the model's.

    Returns:
        What is known; a layer that the forward did not reach is read from the config where that is enough.
    """
    key = (type(config), config.to_json_string(use_diff=False), dtype)
    if key not in _known:
        if len(_known) >= 64:
            _known.clear()
        _known[key] = _run(config, dtype)
    return _known[key]


def _run(config: PreTrainedConfig, dtype: torch.dtype) -> Probe:
    layers, routable = compat.default_layers(config), None
    with _quietly(), contextlib.suppress(Exception):
        own = copy.deepcopy(config)
        # Neither the kernels of this machine nor the format of the stored weights change what is handed over.
        own._attn_implementation = "eager"
        if hasattr(own, "quantization_config"):
            del own.quantization_config
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            model = AutoModel.from_config(own, dtype=dtype, trust_remote_code=False).eval()
            routable = compat.can_route(model)
            # From here on, what the layers got stays readable should the model fail on shapes alone.
            layers = _forward(model, own)
    return Probe(tuple(_read(config, layer, i, dtype) for i, layer in enumerate(layers)), routable)


def _forward(model: torch.nn.Module, config: PreTrainedConfig) -> list:
    cache = DynamicCache(config=config)
    ids = torch.zeros(1, 1, dtype=torch.long, device="meta")
    given: dict[str, object] = {"input_ids": ids, compat.cache_argument(model): cache, "use_cache": True}
    if model.config.is_encoder_decoder:
        given |= {"decoder_input_ids": ids, compat.cache_argument(model): EncoderDecoderCache(cache, DynamicCache())}
    with torch.no_grad(), contextlib.suppress(Exception):
        model(**given)
    return cache.layers


def _read(config: PreTrainedConfig, layer: object, layer_idx: int, dtype: torch.dtype) -> Handed | None:
    """What a layer of the probing cache was given; for keys and values the config stands in where that is nothing."""
    states = tuple(
        (name, number, Shape(tuple(x.shape[1:]), x.dtype))
        for name in ("conv_states", "recurrent_states")
        for number, x in getattr(layer, name, {}).items()
        if isinstance(x, torch.Tensor)
    )
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        sides = (Shape((x.shape[1], x.shape[3]), x.dtype) for x in (keys, values))
        return Handed(*sides, states)
    if compat.is_never_written(layer):
        return Handed()
    if compat.is_full_attention(layer) or compat.is_sliding(layer):
        heads, key_width, value_width = compat.kv_shape(config, layer_idx)
        return Handed(Shape((heads, key_width), dtype), Shape((heads, value_width), dtype))
    return Handed(states=states) if states else None


@contextlib.contextmanager
def _quietly():
    """Keeps back what building and running a model would say: it is not the one that will be used."""
    logger = logging.getLogger("transformers")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            logger.setLevel(level)
