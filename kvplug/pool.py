"""Caches that live in one pool of pages, and what the pool remembers of prompts that it has seen."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from kvplug import compat
from kvplug.attention import configs_of
from kvplug.build import CodecLike, get_codecs
from kvplug.cache import KVCache
from kvplug.codecs import Codec
from kvplug.fingerprint import Fingerprint, differences, fingerprint
from kvplug.layer import KVLayer
from kvplug.memory import human
from kvplug.padding import check_left_padding, check_prompts
from kvplug.policies import Policy
from kvplug.prefixes import Prefixes
from kvplug.probe import probe
from kvplug.sharing import BorrowedLayer
from kvplug.stores import Pages
from kvplug.stores.arena import Arena
from kvplug.stores.pages import PAGE_SIZE


class PagePool(Pages):
    """Pages for any number of caches of one model. Rows and caches that begin alike can hold the same pages. Not for
    several threads at a time.

    After Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023
    (arXiv:2309.06180).

    Args:
        config: the model or its config.
        page_size: tokens of a page.
        codec: storage of keys and values, each token by itself; for all caches of the pool.
        max_bytes: most bytes that its buffers may take, None for any number. A growing buffer is there twice for a
            moment, and keys that a codec can't hold take more than was planned; neither is counted.

    Raises:
        ValueError: an argument is not valid, or a layer's size is not known and `max_bytes` is given.
    """

    def __init__(
        self,
        config: object,
        page_size: int = PAGE_SIZE,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        max_bytes: int | None = None,
    ):
        configs_of(config)  # raises for what is neither
        self.fingerprint = fingerprint(config)
        # A pool does not keep its model alive.
        self._model = weakref.ref(config)
        self._config = config if isinstance(config, PreTrainedConfig) else config.config
        self.codec = tuple(side.tokenwise() for side in get_codecs(codec))
        sizes = {}
        if max_bytes is not None:
            if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
                raise ValueError(
                    f"max_bytes={max_bytes!r} is not valid; a whole number of bytes, at least 1, is accepted"
                )
            sizes = _token_bytes(config, self.codec)
        super().__init__(page_size, max_bytes, sizes)
        self.prefixes = Prefixes(self.arena(None), page_size)

    def __getstate__(self) -> dict:
        return {**vars(self), "_model": None}

    @property
    def config(self) -> object:
        """The model, while it lives, else its config."""
        model = None if self._model is None else self._model()
        return self._config if model is None else model

    def check_model(self, found: Fingerprint) -> None:
        """Raises ValueError where a model is another than the pool's."""
        told = differences(self.fingerprint, found)
        if told:
            raise ValueError(
                f"pool={self!r} is of another model: {'; '.join(told)}. One pool is for one model; the model that it "
                "was made for is accepted"
            )

    def __repr__(self) -> str:
        most = "" if self.max_bytes is None else f" of {human(self.max_bytes)}"
        codec = ", ".join(dict.fromkeys(side.name for side in self.codec))
        return f"PagePool({codec}, page_size={self.page_size}, {self.pages_held} pages, {human(self.nbytes)}{most})"

    @property
    def pages_held(self) -> int:
        """Pages that caches or known prompts hold."""
        return sum(arena.held for arena in self.arenas.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._used({})

    def open(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> PagedCache:
        """A cache that holds what the pool knows of the beginning of some prompts, so that `generate` runs the rest.

        It is given the whole prompts again. `prefill(model, input_ids, pool.open(input_ids), rows=4)` runs the rest for
        beams or samples. Nothing known: the cache is empty.

        Args:
            input_ids: `[batch, tokens]`, whole prompts. Each row is looked up by itself; what is taken is as long as
                the shortest that was found, in whole pages, and leaves at least one token to run.
            attention_mask: `[batch, tokens]`, 0 for padding, which is on the left.

        Raises:
            ValueError: an argument is not valid, or the model has layers whose state is not in pages.
        """
        rows, padding = _rows(input_ids, attention_mask)
        cache = PagedCache(self.config, pool=self)
        _check_all_paged(cache)
        pages = (input_ids.shape[1] - 1) // self.page_size
        found = [self.prefixes.find(ids, count, pages) for ids, count in zip(rows, padding, strict=True)]
        common = min(map(len, found))
        if common:
            self._hand_over(cache, torch.tensor([known[:common] for known in found]))
        cache.prompt = Prompt(rows, padding, cache.layers[cache._tables[0]].store.pages.turn)
        return cache

    def _hand_over(self, cache: PagedCache, pages: torch.Tensor) -> None:
        """Gives an empty cache the pages `[rows, pages]`."""
        table = cache.layers[cache._tables[0]].store.pages
        table.pages = pages
        table.arena.hold(pages)
        for layer in cache.layers:
            if isinstance(layer, KVLayer):
                layer.store.rows, layer.store.length = len(pages), pages.shape[1] * self.page_size
                heads, key_dim, value_dim, dtype, device = table.arena.shapes[layer.store.index]
                layer.store.shape = table.arena.shapes[layer.store.index]
                layer.adopt((len(pages), heads, key_dim, value_dim), dtype, device, layer.store.length)

    def keep(
        self, cache: KVCache, input_ids: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
    ) -> None:
        """Remembers the full pages of a cache, for `open` to find.

        A bounded pool gives them up when it needs room, those first that were not used for longest and that no cache
        holds; one that is not bounded keeps them until `clear`.

        Args:
            cache: one of this pool that keeps all tokens.
            input_ids: the tokens that it has seen, `[batch, tokens]`, such as what greedy `generate` returned; more are
                not looked at. They are believed: after a beam search the cache's rows are those of the last beams,
                which are not what was returned, so give the prompts alone, once for the rows that share one. None for
                the prompts that `open` was given.
            attention_mask: `[batch, tokens]`, as for `open`; None where `open` was given it, or nothing is padding.

        Raises:
            ValueError: the cache is not of this pool or drops tokens, or it is not known which tokens it has seen.
        """
        if not isinstance(cache, PagedCache) or cache.pool is not self:
            raise ValueError(
                f"cache={type(cache).__name__} is not one of this pool; a PagedCache(pool=pool) is accepted"
            )
        _check_all_paged(cache)
        layers = [layer for layer in cache.layers if isinstance(layer, KVLayer)]
        if any(layer.policy is not None for layer in layers):
            raise ValueError("cache drops tokens, so its pages are no prompt's; one that keeps all tokens is accepted")
        table = layers[0].store.pages
        if input_ids is not None:
            rows, padding = _rows(input_ids, attention_mask)
            if attention_mask is None and cache.prompt is not None:
                padding = [cache.prompt.padding_of(ids) for ids in rows]
        elif cache.prompt is None or cache.prompt.turn != table.turn:
            raise ValueError(
                "input_ids=None is for a cache of open() whose rows are still as they were; the tokens that this one "
                "has seen, [batch, tokens], are accepted"
            )
        else:
            rows, padding = cache.prompt.rows, cache.prompt.padding
        if not cache.get_seq_length():
            return
        for layer in layers:
            layer.settle()
        pages = min(len(rows[0]), *(layer.store.length for layer in layers)) // self.page_size
        own = _of_each(table.pages[:, :pages], len(rows))
        for ids, count, held in zip(rows, padding, own.tolist(), strict=True):
            self.prefixes.add(ids, count, held)
        # What is known may not be written to any more.
        table.writable = (0, 0)

    def clear(self) -> None:
        """Forgets all prompts; their pages are free once no cache holds them."""
        self.prefixes.clear()

    def forget(self, nbytes: int) -> None:
        if nbytes > 0:
            self.prefixes.forget(-(-nbytes // self.page_bytes(self.prefixes.arena)))

    def forgettable(self) -> dict[Arena, int]:
        return {self.prefixes.arena: len(self.prefixes.forgettable)}


@dataclass(frozen=True)
class Prompt:
    """What a cache was opened for: tokens and padding of each row, and the table's turn at that time."""

    rows: list[list[int]]
    padding: list[int]
    turn: int

    def padding_of(self, ids: list[int]) -> int:
        """Padding of a row that goes on from one of the prompts; 0 for others.

        Raises:
            ValueError: it goes on from several that differ in padding.
        """
        found = {count for row, count in zip(self.rows, self.padding, strict=True) if ids[: len(row)] == row}
        if len(found) > 1:
            raise ValueError(
                "attention_mask=None does not tell which of the prompts' padding is meant; the mask is accepted"
            )
        return next(iter(found), 0)


def _of_each(pages: torch.Tensor, prompts: int) -> torch.Tensor:
    """The pages of each prompt, `[prompts, pages]`, of rows that go on from them, as many from each.

    Raises:
        ValueError: the rows do not go on from so many prompts.
    """
    rows = len(pages)
    if rows % prompts == 0:
        by_prompt = pages.unflatten(0, (prompts, rows // prompts))
        if bool((by_prompt == by_prompt[:, :1]).all()):
            return by_prompt[:, 0]
    raise ValueError(
        f"input_ids has {prompts} rows, and the cache has {rows}; as many are accepted, or one for each prompt whose "
        "pages several rows share"
    )


def _rows(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[list[list[int]], list[int]]:
    """The tokens of each row, and how many of them are padding."""
    check_prompts(input_ids)
    rows = input_ids.tolist()
    if attention_mask is None:
        return rows, [0] * len(rows)
    return rows, check_left_padding(attention_mask, input_ids).sum(-1).tolist()


def _check_all_paged(cache: KVCache) -> None:
    for i, layer in enumerate(cache.layers):
        if not isinstance(layer, KVLayer | BorrowedLayer) and not compat.is_never_written(layer):
            raise ValueError(
                f"layer {i} ({type(layer).__name__}) keeps a window or a state that is not in pages, so a prompt can't "
                "be taken up where it was left; a model whose layers all have full attention is accepted"
            )


class PagedCache(KVCache):
    """Keys and values in pages: nothing is copied to reorder or repeat rows, and what rows share is stored once.

    Args:
        config: the model or its config.
        page_size: tokens of a page; the pool's own where there is one.
        pool: where the pages are from, None for a pool of its own.
        codec: storage, each token by itself; the pool's own where there is one.
        policy: which tokens stay, None for all; not with `heads="adaptive"`.

    Raises:
        ValueError: an argument is not known, or does not fit the pool.
    """

    # What the pool opened it for.
    prompt: Prompt | None = None

    def __init__(
        self,
        config: object,
        page_size: int | None = None,
        pool: PagePool | None = None,
        *,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        policy: Policy | list[Policy | None] | None = None,
    ):
        if pool is None:
            pool = PagePool(config, PAGE_SIZE if page_size is None else page_size, codec)
        elif not isinstance(pool, PagePool):
            raise ValueError(f"pool={pool!r} is not accepted; a kvplug.PagePool, or None for one of its own")
        else:
            pool.check_model(fingerprint(config))
        if page_size is not None and page_size != pool.page_size:
            raise ValueError(f"page_size={page_size!r} is not that of the pool; {pool.page_size} or None is accepted")
        if codec is not None and tuple(side.tokenwise() for side in get_codecs(codec)) != pool.codec:
            names = ", ".join(side.name for side in pool.codec)
            raise ValueError(f"codec={codec!r} is not that of the pool, ({names}); that or None is accepted")
        super().__init__(config, codec=pool.codec, policy=policy, pool=pool)

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: it can't be done, and then no layer was changed.
        """
        super().crop(tokens_to_remove)
        if self.prompt is not None:
            seen = self.get_seq_length()
            self.prompt = replace(self.prompt, rows=[ids[:seen] for ids in self.prompt.rows]) if seen else None

    def reset(self) -> None:
        """As new, for any batch; pages are given back."""
        super().reset()
        self.prompt = None


def _token_bytes(config: object, codec: tuple[Codec, Codec]) -> dict[int, int]:
    """Bytes of a token in each full-attention layer."""
    model_config = config if isinstance(config, PreTrainedConfig) else config.config
    text = compat.text_config(model_config)
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None) or torch.float32
    known, sizes = probe(text, dtype), {}
    for i, (layer, handed) in enumerate(zip(compat.default_layers(model_config), known.layers, strict=False)):
        if not compat.is_full_attention(layer):
            continue
        if handed is None or handed.keys is None:
            raise ValueError(
                f"max_bytes needs the size of layer {i} of {type(text).__name__}, which is not known; None is accepted"
            )
        sizes[i] = sum(
            one.nbytes(1, *side.sizes, side.dtype)
            for one, side in zip(codec, (handed.keys, handed.values), strict=True)
        )
    return sizes
