"""The one cache that transformers sees: a list of layers built from the model's config.

Every named cache is a recipe over it. It holds no logic of storage or of policies, only what concerns all layers.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from transformers import PreTrainedConfig

from kvplug import compat, files
from kvplug.adaptive import AdaptiveLayer
from kvplug.attention import attach, configs_of
from kvplug.codecs import BITS, ROTATING, Codec, Plain, get_codec
from kvplug.evicting import EvictingLayer
from kvplug.fingerprint import Fingerprint, fingerprint
from kvplug.layer import KVLayer
from kvplug.memory import MemoryReport, measure
from kvplug.policies import Policy, Scored
from kvplug.policies.positional import check_count
from kvplug.residual import ResidualLayer
from kvplug.rope import HINT, Rope, rope_of_layers
from kvplug.scored import ScoredLayer
from kvplug.states import finish_copies, layer_state
from kvplug.stores import OutOfPages, PagedStore, Pages
from kvplug.stores.base import prefixed
from kvplug.stores.contiguous import OUTLIER
from kvplug.stores.residual import defaults
from kvplug.stores.tables import Table

CodecLike = str | Codec | None


class KVCache(compat.Cache):
    """A cache for `model.generate(past_key_values=cache)`: a codec for storage and a policy for eviction.

    Full-attention layers are compressed; sliding and linear layers of hybrid models keep transformers' own classes.

    Args:
        config: the model, or its own config object (not a copy: the model's attention is routed through it).
        codec: name of a dtype ("dense", "fp8", "int8", "int4"), a Codec, or a pair of them for keys and values.
        policy: which tokens stay: None for all, a Policy, or a list with one for each full-attention layer. A group of
            tokens can't lose some of them, so under a policy each token is written by itself.
        residual, sinks: least number of last tokens, and number of first ones, that stay in the model's dtype. By
            default 0 where each token is written by itself in 8 bits or more, else 32 and 4. Not under a policy.
        layer_codecs: another codec, or pair of them, for some layers, by their index in the model.
        pool: pages for the cache to live in, perhaps together with others; None for one buffer a row. Each token is
            written by itself, as under a policy.

    Raises:
        ValueError: an argument is not known, the model has no full-attention layers, or its attention can't be
            routed and the policy needs that; names the argument and what is accepted.
    """

    # Whether the user was told of layers that keep their keys in full precision.
    _warned = False
    # Where pages are from, the first layer of each table, and the layer that a forward comes to first.
    pool: Pages | None = None
    _tables: tuple[int, ...] = ()
    _first: int | None = None
    # Which model the cache is for.
    fingerprint: Fingerprint | None = None

    def __init__(
        self,
        config: object,
        *,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        policy: Policy | Sequence[Policy | None] | None = None,
        residual: int | None = None,
        sinks: int | None = None,
        layer_codecs: Mapping[int, CodecLike | tuple[CodecLike, CodecLike]] | None = None,
        pool: Pages | None = None,
    ):
        layers = make_layers(config, codec, policy, residual, sinks, layer_codecs, pool)
        evicting = any(isinstance(layer, KVLayer) and layer.policy for layer in layers)
        if evicting and isinstance(config, torch.nn.Module) and not compat.can_route(config):
            raise ValueError(
                f"policy={policy!r} needs the model's attention to be routed through kvplug, and "
                f"{type(config).__name__} has its own attention code; a cache that keeps all tokens is accepted "
                "(policy=None)"
            )
        super().__init__(layers=layers)
        self._settle_in(pool)
        try:
            attach(config)
        except ValueError:
            # Without routing the handles decode: slower, and right as long as nothing is evicted.
            if evicting:
                raise
        self.fingerprint = fingerprint(config)

    @classmethod
    def from_layers(cls, layers: list) -> KVCache:
        """A cache of layers that `make_layers` built, without routing any model."""
        cache = cls.__new__(cls)
        compat.Cache.__init__(cache, layers=layers)
        pools = [layer.store.pool for layer in layers if _is_paged(layer)]
        cache._settle_in(pools[0] if pools else None)
        return cache

    def _settle_in(self, pool: Pages | None) -> None:
        """Remembers where pages are from."""
        self.pool = pool
        first: dict[int, int] = {}
        for i, layer in enumerate(self.layers):
            if _is_paged(layer):
                first.setdefault(id(layer.store.pages), i)
        self._tables = tuple(first.values())
        if first:
            # Windows of a hybrid model come before or after; none may have taken tokens that others have no pages for.
            full = min(self._tables)
            self._first = next((i for i, layer in enumerate(self.layers[:full]) if compat.is_sliding(layer)), full)

    def __repr__(self) -> str:
        kinds: dict[str, int] = {}
        for layer in self.layers:
            kinds[repr(layer)] = kinds.get(repr(layer), 0) + 1
        inner = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
        pages = "" if self.pool is None else f"; in pages of {self.pool.page_size} tokens"
        return f"{type(self).__name__}({inner}{pages}; {self.get_seq_length()} tokens seen)"

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """Keys, values and sliding window of each layer, decoded, as `DynamicCache` gives them."""
        for layer in self.layers:
            yield (
                getattr(layer, "keys", None),
                getattr(layer, "values", None),
                getattr(layer, "_sliding_window_tensor", None),
            )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Takes the keys and values of a forward for layer `layer_idx`; returns what attention is to read.

        Args:
            key_states, value_states: `[batch, kv_heads, tokens, head_dim]`.

        Raises:
            ValueError: there is no such layer, or the shapes do not fit what the layer holds.
            OutOfPages: the cache's pool is bounded and full; the cache stays as it was.
        """
        if not 0 <= layer_idx < len(self.layers):
            raise ValueError(
                f"layer_idx={layer_idx} is not a layer of this cache; 0 to {len(self.layers) - 1} is accepted"
            )
        layer = self.layers[layer_idx]
        if layer_idx == self._first:
            self._find_pages(layer, key_states, value_states)
        try:
            out = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except ValueError:
            self._take_back(layer_idx)
            raise
        if not self._warned and isinstance(layer, KVLayer) and layer.store.kept_plain:
            self._tell_outliers()
        if compat.is_sliding(layer) and not layer.record_past:
            _release_window(layer)
        return out

    def _find_pages(self, layer: object, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Makes sure, when the first layer gets its part of a forward, that all have pages for theirs."""
        first = [self.layers[i] for i in self._tables]
        new = layer is first[0] and not layer.is_initialized
        if layer is first[0]:
            layer.check(keys, values)
            if new:
                layer.lazy_initialization(keys, values)
        for one in first:
            if one.is_initialized:
                one.store.check_pool()
        try:
            self.pool.serve([one.want(keys.shape[0], keys.shape[2]) for one in first])
        except OutOfPages:
            if new:
                layer.reset()
            raise

    def _take_back(self, layer_idx: int) -> None:
        """After a layer refused the tokens of a forward: takes them out of the layers before it that can be cropped."""
        seen = getattr(self.layers[layer_idx], "seen", None)
        for layer in self.layers[:layer_idx]:
            if seen is not None and isinstance(layer, KVLayer) and layer.is_croppable and layer.seen > seen:
                layer.crop(seen - layer.seen)

    def _tell_outliers(self) -> None:
        found = [i for i, layer in enumerate(self.layers) if isinstance(layer, KVLayer) and layer.store.kept_plain]
        if found:
            self._warned = True
            warnings.warn(
                f"the keys of layers {', '.join(map(str, found))} have channels more than {OUTLIER:g} times as large "
                "as the median one, which few bits can't hold: these keys are kept in the model's dtype. "
                f"QuantCache takes layer_dtypes={{{found[0]}: 'dense'}} to say so from the start",
                stacklevel=4,
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen, whatever was kept of them."""
        if 0 <= layer_idx < len(self.layers) and not hasattr(self.layers[layer_idx], "get_seq_length"):
            layer_idx = next(i for i, layer in enumerate(self.layers) if isinstance(layer, KVLayer))
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """Defers eviction until `crop`, so that the tokens of a forward can be taken back.

        Raises:
            ValueError: the cache evicts, and this transformers would go on to speculate on it without asking whether
                it can be cropped: a chunk of drafted tokens sees more than they would see one by one.
        """
        if not self.is_croppable and not compat.ASSISTED_DECODING_ASKS:
            raise ValueError(
                "this cache evicts tokens and can't be cropped to restore what a draft displaced; a cache that keeps "
                "all tokens is accepted for assisted decoding (recording needs a newer transformers)"
            )
        super().activate_past_recording()

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: it can't be done, and then no layer was changed.
        """
        for layer in self.layers:
            if isinstance(layer, KVLayer):
                layer.check_crop(tokens_to_remove)
        # Layers of transformers' may refuse: they go first.
        for layer in sorted(self.layers, key=lambda layer: isinstance(layer, KVLayer)):
            layer.crop(tokens_to_remove)

    def memory(self) -> MemoryReport:
        """Exact bytes held, by kind, and what full precision would hold."""
        return measure(self.layers)

    def save(self, path: files.Path) -> None:
        """Writes the cache to a file, from which `kvplug.load(path, model)` goes on to the same tokens.

        The file is safetensors: what is held as it is held, without spare capacity, and how the cache was made. It
        takes the place of an older one only when it is whole and on the disk. Saving takes as much memory of the host
        again as is held, and changes nothing.

        Args:
            path: the file's name, in a folder that exists.

        Raises:
            ValueError: `path` is a folder, or a layer, policy or codec is none of kvplug's own.
            OSError: the file can't be written; an older one is as it was.
        """
        if self.fingerprint is None:
            raise ValueError(
                "a cache that was not made for a model can't be saved; one of a model or config is accepted"
            )
        finish_copies(self.layers)
        states = [prefixed(str(i), layer_state(layer)) for i, layer in enumerate(self.layers)]
        tensors = {name: x for found, _ in states for name, x in found.items()}
        layers = [entry for _, plain in states for entry in plain.values()]
        header = {"cache": type(self).__name__, "seen": self.get_seq_length(), "warned": self._warned}
        files.write(path, tensors, {**header, "model": self.fingerprint, "layers": layers})


def _is_paged(layer: object) -> bool:
    return isinstance(layer, KVLayer) and isinstance(layer.store, PagedStore)


def _release_window(layer) -> None:
    """Lets go of a prompt that a sliding layer's views would pin: one token more than it shows, as in decoding."""
    window = layer.sliding_window
    for name in ("keys", "values"):
        x = getattr(layer, name)
        room = min(layer.cumulative_length, window)
        if x.untyped_storage().nbytes() > x[:, :, :1].numel() * x.itemsize * room:
            base = x.new_empty(*x.shape[:2], room, x.shape[-1])
            shown = base[:, :, room - x.shape[2] :]
            shown.copy_(x)
            setattr(layer, name, shown)


def make_codecs(
    dtype: CodecLike = "int4",
    keys: CodecLike = None,
    values: CodecLike = None,
    scheme: str | None = None,
    group_size: int | None = None,
) -> tuple[Codec, Codec]:
    """The codecs of keys and values, from names of dtypes and from how integers are written.

    Args:
        dtype: for both sides; `keys` and `values` for one of them.
        scheme, group_size: as for `get_codec`, for the sides that are integers; int8 has groups if a scheme is given.

    Raises:
        ValueError: a name is not known, or there is nothing that `scheme` or `group_size` could apply to.
    """
    sides = [("keys", dtype if keys is None else keys), ("values", dtype if values is None else values)]
    own = [grouping(name, scheme, group_size) for _, name in sides]
    if (scheme is not None or group_size is not None) and not any(own):
        argument, name = ("dtype", dtype) if keys is None or values is None else sides[0]
        get_codec(name, argument, scheme=scheme, group_size=group_size)  # raises and says why
    get_codec(dtype, "dtype")
    found = [
        get_codec(name, argument, side=side, **how)
        for side, (argument, name), how in zip(("keys", "values"), sides, own, strict=True)
    ]
    if group_size is not None and all(getattr(codec, "group_size", None) != group_size for codec in found):
        raise ValueError(
            f"group_size={group_size!r} is for groups of keys, or of channels, and keys={found[0].name!r} and "
            f"values={found[1].name!r} have none; None is accepted"
        )
    return found[0], found[1]


def grouping(name: CodecLike, scheme: str | None, group_size: int | None) -> dict[str, object]:
    """What of `scheme` and `group_size` a dtype takes: integers all, int8 only a scheme that it has."""
    takes = isinstance(name, str) and name in BITS and (name != "int8" or scheme not in (None, *ROTATING))
    return {"scheme": scheme, "group_size": group_size} if takes and (scheme, group_size) != (None, None) else {}


def make_layers(
    config: object, codec, policy, residual=None, sinks=None, layer_codecs=None, pool: Pages | None = None
) -> list:
    """The layers of a cache for a model or config: ours where attention is full, transformers' own elsewhere.

    Raises:
        ValueError: as for `KVCache`.
    """
    configs_of(config)  # raises for what is neither
    model_config = config if isinstance(config, PreTrainedConfig) else config.config
    text = compat.text_config(model_config)
    if not getattr(text, "num_attention_heads", None):
        raise ValueError(
            f"config={type(text).__name__} has no attention layers; a model with full attention is accepted"
        )
    layers = compat.default_layers(model_config)
    full = [i for i, layer in enumerate(layers) if compat.is_full_attention(layer)]
    if not full:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise ValueError(
            f"config={type(text).__name__} has no full-attention layers (its layers: {kinds}), so there is nothing to "
            "compress; a model with full attention is accepted"
        )
    sides = get_codecs(codec)
    if isinstance(policy, Scored):
        policies = policy.of_layers(len(full))
    else:
        policies = list(policy) if isinstance(policy, list | tuple) else [policy] * len(full)
    if len(policies) != len(full):
        raise ValueError(
            f"policy has {len(policies)} entries; one for each of the {len(full)} full-attention layers is accepted"
        )
    for one in policies:
        if one is not None and not isinstance(one, Policy):
            raise ValueError(f"policy={one!r} is not accepted; pass a kvplug policy such as kvplug.policies.Window")
    _check_dense_parts(residual, sinks, policy, sides, layer_codecs, pool)
    others = {i: get_codecs(one, f"layer_dtypes[{i!r}]") for i, one in (layer_codecs or {}).items()}
    for i in others:
        if i not in full:
            raise ValueError(
                f"layer_dtypes has an entry for layer {i!r}, which is not a full-attention layer; accepted: "
                f"{', '.join(map(str, full))}"
            )
    ropes = _ropes(text, full, policies)
    stores = _paged_stores(pool, full, policies) if pool is not None else {}
    for i, one, rope in zip(full, policies, ropes, strict=True):
        layers[i] = _make_layer(*others.get(i, sides), one, rope, residual, sinks, stores.get(i))
    return layers


def _paged_stores(pool: Pages, full: list[int], policies: list[Policy | None]) -> dict[int, Callable[..., PagedStore]]:
    """How the store of each layer is made: those that keep equally many tokens share a table."""
    tables: dict[object, Table] = {}
    for policy in policies:
        if isinstance(policy, Scored) and policy.heads == "adaptive":
            raise ValueError(
                "heads='adaptive' can't be had in pages of a pool: its heads share out pages of their own. "
                "heads='uniform' is accepted, or no pool"
            )
        kind = policy.budget if policy is not None else None
        if kind not in tables:
            tables[kind] = pool.table(kind)
    return {
        i: functools.partial(PagedStore, pool, tables[policy.budget if policy is not None else None], i)
        for i, policy in zip(full, policies, strict=True)
    }


def get_codecs(codec, argument: str = "codec") -> tuple[Codec, Codec]:
    """The codecs of keys and values, from one codec or name for both, or a pair."""
    sides = codec if isinstance(codec, tuple | list) else (codec, codec)
    if len(sides) != 2:
        raise ValueError(f"{argument}={codec!r} is not valid; one codec, or a pair for keys and values is accepted")
    return get_codec(sides[0], argument), get_codec(sides[1], argument, side="values")


def _check_dense_parts(residual, sinks, policy, sides: tuple[Codec, Codec], layer_codecs, pool) -> None:
    for name, value in (("residual", residual), ("sinks", sinks)):
        if value is None:
            continue
        check_count(name, value, 0)
        if pool is not None:
            raise ValueError(
                f"{name}={value!r} can't be had in pages: rows that share a page can't have some of its tokens as they "
                "are and some encoded, so each token is written by itself, once attention over it is done; None is "
                "accepted"
            )
        if policy is not None:
            raise ValueError(
                f"{name}={value!r} can't be had together with policy={policy!r}: a group of tokens can't lose some of "
                "them, so under a policy each token is written by itself, once attention over it is done; None is "
                "accepted"
            )
        if all(isinstance(side, Plain) for side in sides) and not layer_codecs:
            raise ValueError(f"{name}={value!r} is for a codec, and all tokens are kept as they are; None is accepted")


def _make_layer(keys: Codec, values: Codec, policy, rope, residual: int | None, sinks: int | None, store) -> KVLayer:
    if store is not None:
        kind = ScoredLayer if isinstance(policy, Scored) else KVLayer if policy is None else EvictingLayer
        return kind(keys.tokenwise(), values.tokenwise(), policy, rope, store)
    if isinstance(policy, Scored):
        kind = AdaptiveLayer if policy.heads == "adaptive" else ScoredLayer
        return kind(keys.tokenwise(), values.tokenwise(), policy, rope)
    if policy is not None:
        return EvictingLayer(keys.tokenwise(), values.tokenwise(), policy, rope)
    if isinstance(keys, Plain) and isinstance(values, Plain):
        return KVLayer(keys, values)
    residual, sinks = (
        own if given is None else given for given, own in zip((residual, sinks), defaults(keys, values), strict=True)
    )
    if keys.granule == values.granule == 1 and residual == sinks == 0:
        return KVLayer(keys, values)
    return ResidualLayer(keys, values, residual, sinks)


def _ropes(config: PreTrainedConfig, full: list[int], policies: list[Policy | None]) -> list[Rope | None]:
    if not any(getattr(policy, "compact", False) or getattr(policy, "needs_rope", False) for policy in policies):
        return [None] * len(full)
    try:
        return rope_of_layers(config, full)
    except ValueError as error:
        if any(getattr(policy, "compact", False) for policy in policies):
            raise
        raise ValueError(str(error).replace(HINT, "use another policy than expected attention")) from None
