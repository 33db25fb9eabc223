"""The named caches: a few lines each over `KVCache`, no logic of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvplug import compat, files
from kvplug.build import CodecLike, grouping, make_codecs
from kvplug.cache import KVCache
from kvplug.codecs import get_codec
from kvplug.joining import Merging, Projecting
from kvplug.low_rank_plan import LowRankPlan
from kvplug.policies import (
    ExpectedAttention,
    HeavyHitters,
    KeyDiff,
    KeyNorm,
    NewestQuery,
    Policy,
    Scored,
    SinkWindow,
    Votes,
    Window,
)
from kvplug.sharing import Groups
from kvplug.sharing_plan import SharingPlan
from kvplug.stores import Pages

Count = int | Sequence[int]
Layers = str | Sequence[float] | None


class DenseCache(KVCache):
    """Full precision, grown in place: exact, and no token is copied twice while decoding.

    Args:
        config: the model or its config.
    """

    def __init__(self, config: object):
        super().__init__(config)


class QuantCache(KVCache):
    """Low-bit storage of all tokens.

    Args:
        config: the model or its config.
        dtype: "fp8" (e4m3), "int8", "int4", "int3" or "int2" for both sides.
        keys, values: a dtype for one side, where it is to differ; "dense" leaves it as it is.
        scheme: how integers are written: "rotated" (the default below 8 bits), "lloyd_max" (a smaller error, slower to
            read), "channel", "token" or "group" (see `kvplug.codecs.get_codec`).
        group_size: tokens whose keys share a row of offsets or scales and are written together, or channels for
            "group"; None for the scheme's own.
        residual: least number of last tokens that stay in the model's dtype.
        sinks: number of first tokens that stay in the model's dtype. Where they are None, 0 for tokens that are written
            one by one in 8 bits or more, else 32 and 4.
        layer_dtypes: another dtype for both sides of some full-attention layers, by index: `{0: "int8"}`.

    Raises:
        ValueError: an argument is not known or does not fit the others.
    """

    def __init__(
        self,
        config: object,
        dtype: CodecLike = "int4",
        *,
        keys: CodecLike = None,
        values: CodecLike = None,
        scheme: str | None = None,
        group_size: int | None = None,
        residual: int | None = None,
        sinks: int | None = None,
        layer_dtypes: Mapping[int, CodecLike] | None = None,
    ):
        sides = make_codecs(dtype, keys, values, scheme, group_size)
        if layer_dtypes is not None and not isinstance(layer_dtypes, Mapping):
            raise ValueError(f"layer_dtypes={layer_dtypes!r} is not accepted; pass a dict such as {{0: 'int8'}}")
        others = {
            layer: tuple(
                get_codec(one, f"layer_dtypes[{layer!r}]", side=side, **grouping(one, scheme, group_size))
                for side in ("keys", "values")
            )
            for layer, one in (layer_dtypes or {}).items()
        }
        super().__init__(config, codec=sides, residual=residual, sinks=sinks, layer_codecs=others)


class WindowCache(KVCache):
    """The last `window` tokens; what leaves the window is forgotten.

    A model that was trained on full attention collapses once its first tokens are dropped: see `StreamingLLMCache`.

    Args:
        config: the model or its config.
        window: tokens kept a layer, or a list with one number for each full-attention layer.
        codec: storage of what is kept, each token by itself.

    Raises:
        ValueError: `window` is below 1.
    """

    def __init__(self, config: object, window: Count, *, codec: CodecLike = None):
        super().__init__(config, codec=codec, policy=_per_layer(Window, window))


class StreamingLLMCache(KVCache):
    """Attention sinks and a recent window, for streams without end.

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023 (arXiv:2309.17453).

    Args:
        config: the model or its config.
        sinks: first tokens kept.
        window: recent tokens kept. Both may be lists with one number for each full-attention layer.
        positions: "compact" counts distances inside the cache, as the paper does: the sinks are re-rotated from a
            pristine copy. "original" keeps them as they were.
        codec: storage of what is kept, each token by itself.

    Raises:
        ValueError: a count is too small, or the model's rotary embedding can't be re-rotated.
    """

    def __init__(
        self,
        config: object,
        sinks: Count = 4,
        window: Count = 1020,
        *,
        positions: str = "compact",
        codec: CodecLike = None,
    ):
        super().__init__(config, codec=codec, policy=_per_layer(SinkWindow, sinks, window, positions=positions))


class SharedCache(KVCache):
    """Layers that share keys and values: the first of a group owns them, the others read them and store nothing.

    A model learns to share by being trained with such a cache: pass it to each forward, after a `reset()`, and
    gradients flow to the owners' projections; those of the layers that borrow are not used and get none. It then
    generates with the same cache. A model that was trained without sharing pays for it: see
    `kvplug.calibrate_sharing` and `MiniCache`.

    With gradient checkpointing transformers runs its layers without a cache, so nothing would be shared.

    Args:
        config: the model or its config.
        groups: "cla2" for pairs of neighbours, "cla3" for threes and so on (Brandon et al., "Reducing Transformer
            Key-Value Cache Size with Cross-Layer Attention", 2024, arXiv:2405.12981); "yoco" for one group of the upper
            half (Sun et al., "You Only Cache Once", 2024, arXiv:2405.05254); or lists of layers by their index, the
            lowest one first: `[[0, 1], [2, 3]]`. Full-attention layers alone can share.
        plan: what `kvplug.calibrate_sharing` found, or the file that it wrote, in the place of `groups`.
        codec, policy, residual, sinks, pool: as for `KVCache`, of the layers that own.

    Raises:
        ValueError: neither or both of `groups` and `plan` are given, one is not valid for the model, or the model is
            trained with gradient checkpointing.
    """

    def __init__(
        self,
        config: object,
        groups: Groups | None = None,
        *,
        plan: SharingPlan | files.Path | None = None,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        policy: Policy | Sequence[Policy | None] | None = None,
        residual: int | None = None,
        sinks: int | None = None,
        pool: Pages | None = None,
    ):
        if (groups is None) == (plan is None):
            raise ValueError(f"groups={groups!r} and plan={plan!r}: one of them is accepted")
        if compat.is_checkpointing(config) and config.training:
            raise ValueError(
                f"{type(config).__name__} is trained with gradient checkpointing, under which its layers run without a "
                "cache and nothing would be shared; gradient_checkpointing_disable() is accepted"
            )
        share = groups if plan is None else SharingPlan.of(plan)
        super().__init__(config, codec=codec, policy=policy, residual=residual, sinks=sinks, pool=pool, share=share)


class MiniCache(KVCache):
    """Deep neighbours merged, for models that were trained without sharing: a pair of layers stores one direction for
    each token and head, and two lengths; tokens that this fits badly have the difference beside it.

    After Liu et al., "MiniCache: KV Cache Compression in Depth Dimension", 2024 (arXiv:2405.14366); what is done in
    another way, and does far less damage, is told at `kvplug.codecs.Merged`. First and last tokens stay as they are.

    Args:
        config: the model or its config.
        start: the first layer that is merged; None for the deeper half of the full-attention layers.
        distinct: tokens that have their difference, of each `group_size`, by layer, head and side.
        group_size: tokens that are written together, up to 256.
        codec: storage of the direction; what has groups of tokens by itself is written token by token.
        residual, sinks: least number of last tokens, and number of first ones, that stay as they came in.

    Raises:
        ValueError: an argument is not valid, or the model's layers can't be merged.
    """

    def __init__(
        self,
        config: object,
        start: int | None = None,
        *,
        distinct: int = 2,
        group_size: int = 32,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        residual: int | None = None,
        sinks: int | None = None,
    ):
        joining = Merging(start, group_size, distinct)
        super().__init__(config, codec=codec, residual=residual, sinks=sinks, joining=joining)


class LowRankCache(KVCache):
    """Values, and if wanted keys, of several layers as coordinates in one basis of fewer directions.

    As in xKV (Chang et al., "xKV: Cross-Layer SVD for KV-Cache Compression", 2025, arXiv:2503.18893), but for the
    basis: there it is the prompt's own, here it is found once for the model, so that it holds for tokens to come as
    well. First and last tokens stay as they came in.

    Args:
        config: the model or its config.
        plan: what `kvplug.calibrate_low_rank` found, or the file that it wrote.
        rank: the part of a group's directions that is kept of the values, up to the plan's own.
        keys: the same for keys, which lose more by it; None to keep them whole.
        codec: storage of the coordinates, and of keys that are whole.
        residual, sinks: least number of last tokens, and number of first ones, that stay as they came in.

    Raises:
        ValueError: an argument is not valid, or the plan was found for another model.
    """

    def __init__(
        self,
        config: object,
        plan: LowRankPlan | files.Path,
        rank: float = 0.5,
        *,
        keys: float | None = None,
        codec: CodecLike | tuple[CodecLike, CodecLike] = None,
        residual: int | None = None,
        sinks: int | None = None,
    ):
        joining = Projecting(LowRankPlan.of(plan), rank, keys)
        super().__init__(config, codec=codec, residual=residual, sinks=sinks, joining=joining)


class ScoredCache(KVCache):
    """What the caches that score tokens have in common; use one of those below.

    In each layer every key-value head keeps the first `sinks` tokens, the last `recent` ones and those that score
    highest. What is dropped is freed once attention over the forward that brought it is done, so a prompt's own
    attention is exact, and the budget holds from then on, while decoding too.

    Args:
        config: the model or its config.
        budget: tokens kept by each key-value head of a layer: a number, or a share of the prompt as a float (0.25),
            where the prompt is the cache's first forward.
        recent: last tokens that stay whatever they score, at least 1; None for the policy's own number.
        sinks: first tokens that stay whatever they score, as many as fit. Trained models fail without them.
        heads: "uniform", or "adaptive" to let the heads of a layer compete for its tokens (Ada-KV).
        layers: None, "pyramid" for more in the first layers and less in the last (PyramidKV), or a list of shares.
        codec: storage of what is kept, each token by itself.
        more: further arguments of the policy.

    Raises:
        ValueError: an argument is not valid, or the model can't be used with an evicting cache.
    """

    policy: type[Scored]

    def __init__(
        self,
        config: object,
        budget: int | float,
        recent: int | None = None,
        *,
        sinks: int = 4,
        heads: str = "uniform",
        layers: Layers = None,
        codec: CodecLike = None,
        **more: int,
    ):
        if type(self) is ScoredCache:
            raise ValueError(
                "ScoredCache has no policy of its own; use H2OCache, SnapKVCache, TOVACache, KeyDiffCache, "
                "KnormCache or ExpectedAttentionCache"
            )
        policy = self.policy(budget, recent, sinks, heads, layers, **more)
        super().__init__(config, codec=codec, policy=policy)


class H2OCache(ScoredCache):
    """Heavy hitters: the tokens that all queries so far attended to most (see `kvplug.policies.HeavyHitters`)."""

    policy = HeavyHitters


class SnapKVCache(ScoredCache):
    """What the last queries look at, and its neighbours (see `kvplug.policies.Votes`).

    Args:
        observe: queries that vote, 32 by default.
        kernel: neighbours in time over which votes are pooled, 5 by default.
    """

    policy = Votes

    def __init__(self, config: object, budget: int | float, observe: int = 32, kernel: int = 5, **more):
        super().__init__(config, budget, observe=observe, kernel=kernel, **more)


class TOVACache(ScoredCache):
    """What the newest query attends to (see `kvplug.policies.NewestQuery`)."""

    policy = NewestQuery


class KeyDiffCache(ScoredCache):
    """Keys unlike the others (see `kvplug.policies.KeyDiff`)."""

    policy = KeyDiff


class KnormCache(ScoredCache):
    """Keys of a small norm (see `kvplug.policies.KeyNorm`)."""

    policy = KeyNorm


class ExpectedAttentionCache(ScoredCache):
    """What the queries to come are expected to attend to (see `kvplug.policies.ExpectedAttention`).

    Args:
        future: how many queries to come are thought of, 512 by default.
    """

    policy = ExpectedAttention

    def __init__(self, config: object, budget: int | float, future: int = 512, **more):
        super().__init__(config, budget, future=future, **more)


def _per_layer(policy, *counts: Count, **kwargs):
    """One policy, or a list of them where a count is given for each layer."""
    lists = [count for count in counts if isinstance(count, list | tuple)]
    if not lists:
        return policy(*counts, **kwargs)
    if len({len(count) for count in lists}) > 1:
        raise ValueError(f"{', '.join(map(repr, lists))} differ in length; one number for each layer is accepted")
    layers = len(lists[0])
    rows = zip(*(count if count in lists else [count] * layers for count in counts), strict=True)
    return [policy(*row, **kwargs) for row in rows]
