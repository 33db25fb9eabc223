"""The layers of a cache, from what a user asks for: codecs, policies, pages, and which layers share.

Says no where two things can't be had together, and why. Must never touch a layer that exists or route a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from transformers import PreTrainedConfig

from kvplug import compat
from kvplug.adaptive import AdaptiveLayer
from kvplug.attention import configs_of
from kvplug.codecs import BITS, ROTATING, Codec, Plain, get_codec
from kvplug.evicting import EvictingLayer
from kvplug.joining import Joined, Joining
from kvplug.joint import Group, JointLayer
from kvplug.layer import KVLayer
from kvplug.policies import Policy, Scored
from kvplug.policies.positional import check_count
from kvplug.residual import ResidualLayer
from kvplug.rope import HINT, Rope, rope_of_layers
from kvplug.scored import ScoredLayer
from kvplug.sharing import BorrowedLayer, Readers, owners
from kvplug.sharing_plan import SharingPlan
from kvplug.stores import PagedStore, Pages
from kvplug.stores.residual import RESIDUAL, defaults
from kvplug.stores.tables import Table

CodecLike = str | Codec | None


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
    config: object,
    codec,
    policy,
    residual=None,
    sinks=None,
    layer_codecs=None,
    pool: Pages | None = None,
    share=None,
    joining: Joining | None = None,
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
    groups = share.groups_for(config) if isinstance(share, SharingPlan) else share
    borrowed = owners(groups, full) if groups is not None else {}
    _check_alike(text, borrowed)
    full = [i for i in full if i not in borrowed]
    sides = get_codecs(codec)
    if isinstance(policy, Scored):
        policies = policy.of_layers(len(full))
    else:
        policies = list(policy) if isinstance(policy, list | tuple) else [policy] * len(full)
    if len(policies) != len(full):
        raise ValueError(
            f"policy has {len(policies)} entries; one for each of the {len(full)} full-attention layers is accepted"
            f"{', those that borrow left out' if borrowed else ''}"
        )
    for one in policies:
        if one is not None and not isinstance(one, Policy):
            raise ValueError(f"policy={one!r} is not accepted; pass a kvplug policy such as kvplug.policies.Window")
    joined = _joined(joining, config, full, sides, policy, pool, share)
    _check_alike(text, {i: group[0] for group, *_ in joined for i in group[1:]})
    _check_dense_parts(residual, sinks, policy, sides, layer_codecs or joined, pool)
    others = {i: get_codecs(one, f"layer_dtypes[{i!r}]") for i, one in (layer_codecs or {}).items()}
    for i in others:
        if i in borrowed:
            raise ValueError(
                f"layer_dtypes has an entry for layer {i!r}, which reads the keys and values of layer {borrowed[i]}; "
                f"accepted: {', '.join(map(str, full))}"
            )
        if any(i in group for group, *_ in joined):
            raise ValueError(f"layer_dtypes has an entry for layer {i!r}, which is stored together with others")
        if i not in full:
            raise ValueError(
                f"layer_dtypes has an entry for layer {i!r}, which is not a full-attention layer; accepted: "
                f"{', '.join(map(str, full))}"
            )
    ropes = _ropes(text, full, policies)
    stores = _paged_stores(pool, full, policies) if pool is not None else {}
    for i, one, rope in zip(full, policies, ropes, strict=True):
        layers[i] = _make_layer(*others.get(i, sides), one, rope, residual, sinks, stores.get(i))
    for number, (group, *codecs) in enumerate(joined):
        shared = Group(*codecs, len(group), number)
        for member, i in enumerate(group):
            layers[i] = JointLayer(shared, member, *_counts(residual, sinks, RESIDUAL))
    lend(layers, borrowed, compat.readers(model_config))
    return layers


# Why layers that are stored together can't be had with what else a cache may be asked for.
NOT_TOGETHER = {
    "policy": "a token is stored for all of them at once, and each would drop others",
    "pool": "tokens are written in groups over several layers, which no page holds",
    "share": "a layer that borrows stores nothing that could be stored together",
}


def _joined(joining: Joining | None, config: object, full: list[int], sides, policy, pool, share) -> list[Joined]:
    """The layers that are stored together, with their codecs."""
    if joining is None:
        return []
    if not isinstance(joining, Joining):
        raise ValueError(f"joining={joining!r} is not accepted; pass a kvplug.joining.Joining, or None")
    for name, value in (("policy", policy), ("pool", pool), ("share", share)):
        if value is not None:
            raise ValueError(
                f"{name}={value!r} can't be had with layers that are stored together: {NOT_TOGETHER[name]}; None is "
                "accepted"
            )
    return joining.groups(config, full, sides)


def _counts(residual: int | None, sinks: int | None, own: tuple[int, int]) -> list[int]:
    return [mine if given is None else given for given, mine in zip((residual, sinks), own, strict=True)]


def lend(layers: list, borrowed: Mapping[int, int], handed_on: Mapping[int, int]) -> None:
    """Has layers read the keys and values of others.

    Args:
        layers: those of a cache; that of a layer that borrows takes the place of what is there.
        borrowed: the owner of each layer that borrows.
        handed_on: to how many layers the model itself hands on what is shown of a layer.
    """
    for i in {*handed_on, *borrowed.values()}:
        if isinstance(layers[i], KVLayer):
            layers[i].readers = Readers(handed_on.get(i, 0))
    for i, owner in borrowed.items():
        layers[i] = BorrowedLayer(layers[owner], owner)


def _check_alike(config: PreTrainedConfig, first: Mapping[int, int]) -> None:
    """Raises ValueError where a layer is to have its keys and values in common with one of another shape."""
    for i, owner in first.items():
        own, other = (compat.kv_shape(config, layer) for layer in (i, owner))
        if own != other:
            raise ValueError(
                f"layer {i} can't share the keys and values of layer {owner}: it has {own[0]} heads of widths "
                f"{own[1:]} and that one {other[0]} of {other[1:]}; groups of layers alike are accepted"
            )


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
    residual, sinks = _counts(residual, sinks, defaults(keys, values))
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
