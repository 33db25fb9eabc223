"""How many bytes a cache will hold: the cache itself is run on shapes alone, so plan and measurement can't drift apart.

Must never allocate for a token or a weight, and never change the config or the model that it is given.
"""

from __future__ import annotations

import copy
import math

import torch
from transformers import PreTrainedConfig

from kvplug import compat
from kvplug.absorb import is_absorbed
from kvplug.build import make_layers
from kvplug.cache import KVCache
from kvplug.layer import KVLayer
from kvplug.memory import MemoryReport, measure
from kvplug.policies import Scored
from kvplug.probe import Handed, Probe, Shape, probe
from kvplug.residual import ResidualLayer
from kvplug.sharing import BorrowedLayer
from kvplug.spec import parse

# Tokens of a prompt that tell what one of those that a share keeps costs.
MANY = 4096


def plan(config: object, spec: str, tokens: int, batch: int = 1, dtype: torch.dtype | None = None) -> MemoryReport:
    """Exact bytes that a cache will hold after `tokens` tokens, before anything is allocated.

    Args:
        config: the model or its config; neither is changed.
        spec: the cache, as for `from_spec`.
        tokens: tokens seen by each row, prompt and generated ones together.
        batch: rows, without padding.
        dtype: the model's; by default what the config names, else fp32.

    Returns:
        The report that `cache.memory()` gives, to the byte, however the tokens come in. Only a budget that is a share
        of the prompt, and heads that compete, depend on that: there all tokens are the prompt's.

    Raises:
        ValueError: an argument is not valid, the model can't be used with the cache, or a layer's size is not known.
    """
    return Planner(config, spec, dtype).report(tokens, batch)


class Planner:
    """The plan of one cache for one model, for any number of tokens. Layers that are alike are planned once.

    Args:
        config, spec, dtype: as for `plan`.

    Attributes:
        layers: how many layers there are of each kind: "full", "sliding", "linear", "shared".
        budget: most tokens that a full-attention layer keeps, None where one keeps all or a share.
        share: the part of a prompt that the full-attention layers keep on average, None where that is no share.

    Raises:
        ValueError: as `plan` does.
    """

    def __init__(self, config: object, spec: str, dtype: torch.dtype | None = None):
        composition = parse(spec)
        layers = make_layers(config, **vars(composition))
        model_config = config if isinstance(config, PreTrainedConfig) else config.config
        text = compat.text_config(model_config)
        named = dtype or getattr(text, "dtype", None) or getattr(model_config, "dtype", None)
        self.dtype: torch.dtype = named or torch.float32
        known = probe(text, self.dtype)
        _check_eviction(text, layers, known, is_absorbed(config))
        self.layers: dict[str, int] = {}
        for layer in layers:
            self.layers[_kind(layer)] = self.layers.get(_kind(layer), 0) + 1
        budgets = [layer.budget for layer in layers if isinstance(layer, KVLayer)]
        self.budget: int | None = None if None in budgets else max(budgets)
        shares = [layer.policy.budget for layer in layers if isinstance(layer, KVLayer) and layer.policy]
        shares = [share for share in shares if isinstance(share, float)]
        self.share: float | None = sum(shares) / len(shares) if shares else None
        self._windows = [layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")]
        self._remembers = any(isinstance(layer, KVLayer) and isinstance(layer.policy, Scored) for layer in layers)
        self._alike(text, layers, known)

    def _alike(self, text: PreTrainedConfig, layers: list, known: Probe) -> None:
        """Keeps one layer of each group of equal ones, and for each layer of the model the number of its group."""
        groups: dict[tuple, int] = {}
        self._first: list[tuple[object, Handed]] = []
        self._group: list[int] = []
        for i, layer in enumerate(layers):
            handed = known.layers[i] if i < len(known.layers) else None
            if handed is None or _kind(layer) == "other":
                raise ValueError(
                    f"config={type(text).__name__}: the size of layer {i} ({type(layer).__name__}) is not known; "
                    "full, sliding, shared and linear attention are accepted, the last where the model runs with "
                    "transformers' own cache"
                )
            if isinstance(layer, KVLayer):
                own = layer.settings
            elif isinstance(layer, BorrowedLayer):
                # What it reads is told by any owner that is alike.
                own = BorrowedLayer, self._group[layer.index]
                layer = BorrowedLayer(self._first[own[1]][0], layer.index)
            else:
                own = type(layer), getattr(layer, "sliding_window", None)
            group = groups.setdefault((own, handed), len(self._first))
            if group == len(self._first):
                self._first.append((layer, handed))
            self._group.append(group)

    def report(self, tokens: int, batch: int = 1) -> MemoryReport:
        """What the cache holds after `tokens` tokens in each of `batch` rows.

        Raises:
            ValueError: a number is not whole or too small.
        """
        return self._measure(tokens, batch)

    def _measure(self, tokens: int, batch: int, only: tuple[bool, ...] = (True, False)) -> MemoryReport:
        for name, value, least in (("tokens", tokens, 0), ("batch", batch, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} is not valid; a whole number of at least {least} is accepted")
        # Together: layers may share a table of pages.
        cache = KVCache.from_layers(copy.deepcopy([layer for layer, _ in self._first]))
        for i, (_, handed) in enumerate(self._first):
            _fill(cache, i, handed, tokens, batch)
        layers = [cache.layers[group] for group in self._group]
        return measure(layer for layer in layers if isinstance(layer, KVLayer) in only)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token adds to one row while it is kept, spare capacity left out: a mean over a group of tokens
        that are encoded together, to the nearest byte."""
        if self.share is not None:
            held = self._measure(MANY, 1, only=(True,))
            return round(held.used / held.tokens_kept)
        stores = [layer.store for layer, _ in self._first if isinstance(layer, ResidualLayer)]
        # What a policy remembers of a layer is no token's.
        start = max((store.sinks + store.residual for store in stores), default=int(self._remembers))
        step = math.lcm(*(store.group for store in stores))
        more, less = (self._measure(tokens, 1, only=(True,)).used for tokens in (start + step, start))
        return round((more - less) / step)

    def fixed(self, batch: int = 1) -> int:
        """Bytes of what stops growing in all rows whatever the spec: full sliding windows, states, and their like."""
        return self._measure(self.settled, batch, only=(False,)).total

    @property
    def settled(self) -> int:
        """The number of tokens from which on only layers that keep all tokens grow."""
        return max([1, self.budget or 0, *self._windows])

    def fits(self, memory: int, batch: int = 1) -> int | None:
        """Most tokens in each of `batch` rows whose cache holds at most `memory` bytes; None where any number fits."""
        if self.budget is not None and self.report(self.settled, batch).total <= memory:
            return None
        low, high = 0, 1
        while self.report(high, batch).total <= memory:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.report(middle, batch).total <= memory:
                low = middle
            else:
                high = middle
        return low


def _kind(layer: object) -> str:
    if isinstance(layer, KVLayer):
        return "full"
    if compat.is_never_written(layer) or isinstance(layer, BorrowedLayer):
        return "shared"
    if compat.is_sliding(layer):
        return "sliding"
    return "linear" if compat.is_linear(layer) else "other"


def _check_eviction(text: PreTrainedConfig, layers: list, known: Probe, absorbed: bool) -> None:
    """Raises where a cache that drops tokens would refuse the model once it is used."""
    for i, layer in enumerate(layers):
        if not isinstance(layer, KVLayer) or layer.policy is None:
            continue
        accepted = "one that keeps all tokens"
        if known.routable is False:
            reason = "has its own attention code, which can't be routed through kvplug"
        elif absorbed:
            continue
        elif compat.hands_over_latents(text, i) and known.layers[i].keys.sizes == (1, text.kv_lora_rank):
            reason = "expands the latents that it caches before attention reads them"
            accepted = "the model itself after kvplug.absorb(model), or a cache that keeps all tokens,"
        else:
            continue
        raise ValueError(
            f"a cache that drops tokens can't be used here: a {text.model_type} model {reason}; {accepted} is accepted"
        )


def _fill(cache: KVCache, layer_idx: int, handed: Handed, tokens: int, batch: int) -> None:
    if tokens == 0 or isinstance(cache.layers[layer_idx], BorrowedLayer):
        return
    if handed.keys is not None:
        keys, values = (_empty(batch, tokens, side) for side in (handed.keys, handed.values))
        cache.update(keys, values, layer_idx)
        readers = getattr(cache.layers[layer_idx], "readers", None)
        if readers is not None:
            readers.end()  # nobody attends
    for name, number, shape in handed.states:
        state = torch.empty(batch, *shape.sizes, dtype=shape.dtype, device="meta")
        getattr(cache.layers[layer_idx], name)[number] = state


def _empty(batch: int, tokens: int, side: Shape) -> torch.Tensor:
    heads, width = side.sizes
    return torch.empty(batch, heads, tokens, width, dtype=side.dtype, device="meta")
