"""Caches that live in one pool of pages, and what the pool remembers of prompts that it has seen."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from kvplug import compat
from kvplug.cache import CodecLike, KVCache, get_codecs
from kvplug.codecs import Codec
from kvplug.memory import human
from kvplug.policies import Policy
from kvplug.policies.positional import check_count
from kvplug.probe import probe
from kvplug.stores import Pages
from kvplug.stores.pages import PAGE_SIZE


class PagePool(Pages):
    """Pages for any number of caches of one model. Rows and caches that begin alike can hold the same pages.

    After Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023
    (arXiv:2309.06180).

    Args:
        config: the model or its config.
        page_size: tokens of a page.
        codec: storage of keys and values, each token by itself; for all caches of the pool.
        max_bytes: most bytes that its buffers may take, None for any number. A growing buffer is there twice for a
            moment; that is not counted.

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
        self.config = config
        self.codec = tuple(side.tokenwise() for side in get_codecs(codec))
        sizes = {}
        if max_bytes is not None:
            check_count("max_bytes", max_bytes, 1)
            sizes = _token_bytes(config, self.codec)
        super().__init__(page_size, max_bytes, sizes)

    def __repr__(self) -> str:
        most = "" if self.max_bytes is None else f" of {human(self.max_bytes)}"
        return f"PagePool(page_size={self.page_size}, {self.pages_held} pages, {human(self.nbytes)}{most})"

    @property
    def pages_held(self) -> int:
        """Pages that caches or known prefixes hold."""
        return sum(arena.held for arena in self.arenas.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self._used({})


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
        if page_size is not None and page_size != pool.page_size:
            raise ValueError(f"page_size={page_size!r} is not that of the pool; {pool.page_size} or None is accepted")
        if codec is not None and tuple(side.tokenwise() for side in get_codecs(codec)) != pool.codec:
            names = ", ".join(side.name for side in pool.codec)
            raise ValueError(f"codec={codec!r} is not that of the pool, ({names}); that or None is accepted")
        super().__init__(config, codec=pool.codec, policy=policy, pool=pool)


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
