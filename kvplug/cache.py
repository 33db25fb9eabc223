"""The one cache that transformers sees: a list of layers built from the model's config.

Every named cache is a recipe over it. It holds no logic of storage or of policies, only what concerns all layers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence

import torch

from kvplug import compat, files
from kvplug.attention import attach
from kvplug.build import CodecLike, make_layers
from kvplug.fingerprint import Fingerprint, fingerprint
from kvplug.joining import Joining
from kvplug.layer import KVLayer
from kvplug.memory import MemoryReport, measure
from kvplug.policies import Policy
from kvplug.sharing import Groups
from kvplug.sharing_plan import SharingPlan
from kvplug.states import finish_copies, layer_state
from kvplug.stores import OutOfPages, PagedStore, Pages
from kvplug.stores.base import prefixed
from kvplug.stores.contiguous import OUTLIER


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
        share: which layers read the keys and values of another (see `SharedCache`), None for no layer. All that is
            said of each full-attention layer is then said of those that own theirs.
        joining: which layers are encoded together (see `MiniCache` and `LowRankCache`), None for no layer; `codec` is
            then what is applied to the result. Not with a policy, a pool or `share`.

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
        share: Groups | SharingPlan | None = None,
        joining: Joining | None = None,
    ):
        layers = make_layers(config, codec, policy, residual, sinks, layer_codecs, pool, share, joining)
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
                if layer.readers is not None:
                    layer.readers.end()

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
        for layer in self.layers:
            # All before any is written: some are encoded together.
            if isinstance(layer, KVLayer):
                layer.settle()
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
