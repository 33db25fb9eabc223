"""Compressing a context that many later questions reuse: a second pass over it tells what is worth keeping.

Must never see a question: what it keeps serves any of them.
"""

from __future__ import annotations

import copy
import inspect

import torch
from transformers import PreTrainedModel

from kvplug import compat
from kvplug.attention import attach
from kvplug.build import CodecLike, get_codecs, make_layers
from kvplug.cache import KVCache
from kvplug.codecs import Codec
from kvplug.fingerprint import fingerprint
from kvplug.layer import KVLayer
from kvplug.policies.positional import check_count
from kvplug.policies.scored import PROTECTED, check_budget, order, tokens_of
from kvplug.stores.compressed import CompressedStore
from kvplug.stores.contiguous import ContiguousStore
from kvplug.stores.heads import HeadStore, Shares, page_of
from kvplug.view import Segment, Watch

METHODS = ("kvzip",)
# Tokens of the context that are repeated at a time, and those before them that say where to go on.
CHUNK, LEAD = 2048, 8


class WatchedLayer(KVLayer):
    """Keeps all tokens, and may remember the most attention that each of the first `count` drew from any query."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.direct = False
        self.most: torch.Tensor | None = None

    def watch(self, count: int) -> None:
        """From now on: remembers `[batch, kv_heads, count]` as `most`."""
        self.most = torch.zeros(*self.shape[:2], count, device=self.device)

    def _watch(self) -> Watch | None:
        return None if self.most is None else Watch(None, self._see)

    def _see(self, weights: torch.Tensor) -> None:
        count = self.most.shape[-1]
        torch.maximum(self.most, weights[..., :count].amax((2, 3)), out=self.most)


class CompressedLayer(KVLayer):
    """A context of which each head has kept a choice of its own, and all tokens that come after it.

    Args:
        store: what is kept of the context.
        like: the layer that has seen the context.
    """

    drops = True

    def __init__(self, store: CompressedStore, like: KVLayer):
        super().__init__(store.keys.codec, store.values.codec)
        self.store, self.direct = store, False
        self._begin(like.dtype, like.device, like.shape)

    def _begin(self, dtype: torch.dtype, device: torch.device, shape: tuple[int, int, int, int]) -> None:
        self.seen, self.dtype, self.device, self.shape = self.store.first, dtype, device, (1, *shape[1:])
        self.store.allocate(*(torch.empty(*shape[:2], 0, width, dtype=dtype, device=device) for width in shape[2:]))
        self.is_initialized = True

    @property
    def settings(self) -> tuple:
        return (id(self),)

    @property
    def kept(self) -> int | float:
        return self.store.context.length / self.shape[1] + self.store.later.length + self.unfinished

    @property
    def holes(self) -> bool:
        return True

    def _stored(self, before: int) -> list[Segment]:
        return self.store.segments()

    def _contents(self, side: int) -> torch.Tensor | None:
        self.settle()
        parts = [self.store.context.by_head(side, self.dtype)]
        if self.store.later.length:
            parts.append(self.store.later.view(0, self.store.later.length)[side].decode(self.dtype))
        return torch.cat(parts + ([] if self.fresh is None else [self.fresh[side]]), dim=2)

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that `crop` would remove.

        Raises:
            ValueError: it is not a number up to 0, or reaches into the context.
        """
        remove = super().check_crop(tokens_to_remove)
        if remove > self.seen - self.store.first:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} reaches into the compressed context of {self.store.first} tokens"
                f"; {self.store.first - self.seen} to 0 is accepted"
            )
        return remove

    def reset(self) -> None:
        """As `compress` returned it: the context, for a batch of one."""
        dtype, device, shape = self.dtype, self.device, self.shape
        super().reset()
        self._begin(dtype, device, shape)


class CompressedCache(KVCache):
    """What `compress` returns."""

    def reset(self) -> None:
        """Takes all later tokens back: the context, for a batch of one.

        Raises:
            ValueError: the model has layers of other kinds, which can't go back.
        """
        others = {type(layer).__name__ for layer in self.layers if not isinstance(layer, CompressedLayer)}
        if others:
            raise ValueError(
                f"reset() can't take tokens back from layers of the kind {', '.join(sorted(others))}; "
                "copy.deepcopy(cache) before a question is accepted"
            )
        super().reset()


@torch.no_grad()
def compress(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    budget: int | float,
    method: str = "kvzip",
    *,
    sinks: int = 4,
    recent: int = 32,
    codec: CodecLike | tuple[CodecLike, CodecLike] = None,
    chunk: int = CHUNK,
    instruction_ids: torch.Tensor | None = None,
) -> KVCache:
    """A cache that holds what matters of a context, for many later questions: it is chosen without seeing one.

    Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", 2025 (arXiv:2505.23416). The
    context is read once, then the model is made to repeat it: what it looks at to do so is kept. A token's score in a
    head is the most attention that any query of the repetition pays to it; all heads of all layers compete. It costs a
    second pass over the context, and until that is over the whole context is held in full precision.

    Later tokens are all kept. `crop` takes them back and `reset` all of them, so that one cache serves question after
    question; `copy.deepcopy` makes another one, which hybrid models need.

    Args:
        model: a transformers model whose attention can be routed through kvplug, which it is from then on.
        input_ids: the context, int64 `[1, tokens]`.
        budget: tokens that a key-value head of a layer keeps on average, or a share of the context as a float (0.25).
        method: "kvzip".
        sinks, recent: first and last tokens that all heads keep, the last ones up to half of the budget.
        codec: storage of what is kept and of later tokens, each token by itself.
        chunk: tokens that are repeated at a time.
        instruction_ids: what the model is told before it repeats, `[1, tokens]`; None for nothing.

    Returns:
        A cache that has seen `tokens` tokens: pass it to `generate` with ids of the context and the question together.

    Raises:
        ValueError: an argument is not valid, or the model has no full-attention layers; names it and what is accepted.
    """
    check_budget(budget)
    if method not in METHODS:
        raise ValueError(f"method={method!r} is not known; use one of {', '.join(METHODS)}")
    check_count("sinks", sinks, 0)
    check_count("recent", recent, 0)
    check_count("chunk", chunk, 1)
    for name, ids in (("input_ids", input_ids), ("instruction_ids", instruction_ids)):
        if ids is not None and (ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1):
            raise ValueError(f"{name} has shape {tuple(ids.shape)}; one context, [1, tokens], is accepted")
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model={type(model).__name__} is not accepted; pass a transformers model")
    if not compat.can_route(model):
        raise _unwatched(model)
    layers = make_layers(model, None, None)
    full = [i for i, layer in enumerate(layers) if isinstance(layer, KVLayer)]
    sides = [one.tokenwise() for one in get_codecs(codec)]
    for i in full:
        layers[i] = WatchedLayer()
    attach(model)
    cache = KVCache.from_layers(layers)
    _read(model, input_ids, cache)
    others = {i: copy.deepcopy(layer) for i, layer in enumerate(layers) if i not in full}
    _repeat(model, input_ids, cache, full, others, chunk, instruction_ids)
    if not all(layers[i].most.any() for i in full):
        raise _unwatched(model)
    tokens = input_ids.shape[1]
    mean = min(tokens_of(budget, tokens), tokens)
    recent = min(recent, mean // 2)
    kept = _choose([layers[i].most for i in full], mean, min(sinks, mean - recent), recent)
    for i, keep in zip(full, kept, strict=True):
        layers[i] = _compressed(layers[i], keep, sides, page_of(mean))
    compressed = CompressedCache.from_layers(layers)
    compressed.fingerprint = fingerprint(model)
    return compressed


def _unwatched(model: PreTrainedModel) -> ValueError:
    return ValueError(
        f"model={type(model).__name__} has attention code of its own, which can't be watched; a model whose attention "
        "function gets the keys and values of its cache is accepted"
    )


def _read(model: PreTrainedModel, ids: torch.Tensor, cache: KVCache) -> None:
    arguments = {compat.cache_argument(model): cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1
    model(input_ids=ids.to(model.device), **arguments)


def _repeat(model, ids: torch.Tensor, cache: KVCache, full: list[int], others: dict, chunk: int, instruction) -> None:
    """Has the model repeat the context chunk by chunk, each right behind the context, and its layers watch."""
    for i in full:
        cache.layers[i].watch(ids.shape[1])
    for start in range(0, ids.shape[1], chunk):
        # The last tokens of the chunk before tell where to go on.
        part = ids[:, max(start - LEAD, 0) : start + chunk]
        if instruction is not None:
            part = torch.cat([instruction.to(part.device), part], dim=1)
        _read(model, part, cache)
        for i in full:
            cache.layers[i].crop(-part.shape[1])
        for i, layer in others.items():
            cache.layers[i] = copy.deepcopy(layer)


def _choose(most: list[torch.Tensor], mean: int, sinks: int, recent: int) -> list[torch.Tensor]:
    """Which tokens each head of each layer keeps, bool `[1, kv_heads, tokens]`: `mean` a head on average, the first
    `sinks` and the last `recent` ones in any case."""
    ranks = []
    for scores in most:
        positions = torch.arange(scores.shape[-1], device=scores.device)
        sure = (positions < sinks) | (positions >= scores.shape[-1] - recent)
        ranks.append((order(scores, positions) + PROTECTED * sure).cpu())
    flat = torch.cat([rank.flatten() for rank in ranks])
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[flat.topk(mean * sum(rank.shape[1] for rank in ranks)).indices] = True
    parts = kept.split([rank.numel() for rank in ranks])
    return [part.view(rank.shape).to(scores.device) for part, rank, scores in zip(parts, ranks, most, strict=True)]


def _compressed(layer: WatchedLayer, kept: torch.Tensor, sides: list[Codec], page: int) -> CompressedLayer:
    tokens = kept.shape[-1]
    slots = kept.sum(-1)
    number = torch.arange(tokens, device=kept.device)
    # In order of time.
    shares = Shares.of((tokens - number).expand_as(kept), kept, slots, page, max(int((-(-slots // page)).sum()), 1))
    keys, values = layer.keys, layer.values
    empty = ContiguousStore(*sides, tables=("positions",))
    context = HeadStore.of(empty, keys, values, {"positions": number.expand_as(kept)}, shares)
    return CompressedLayer(CompressedStore(*sides, context, tokens), layer)
