"""A cache from a file that `cache.save` wrote: it goes on as if it had never been away.

Everything is checked before anything is built, and the model is routed last, so a file that is refused leaves no trace.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from transformers import PreTrainedConfig

from kvplug import compat, files, recipes
from kvplug.adaptive import AdaptiveLayer
from kvplug.attention import attach, configs_of
from kvplug.build import lend, make_layers
from kvplug.cache import KVCache
from kvplug.compress import CompressedCache, CompressedLayer
from kvplug.evicting import EvictingLayer
from kvplug.files import Path, refusal
from kvplug.fingerprint import differences, fingerprint
from kvplug.joint import Group, JointLayer
from kvplug.layer import KVLayer
from kvplug.policies import POLICIES
from kvplug.pool import PagedCache, PagePool
from kvplug.residual import ResidualLayer
from kvplug.scored import ScoredLayer
from kvplug.sharing import BorrowedLayer, groups
from kvplug.states import CODEC_KINDS, load_theirs, made
from kvplug.stores import State
from kvplug.stores.base import copied, dtype_named, part_of
from kvplug.stores.compressed import CompressedStore
from kvplug.stores.heads import HeadStore

EVICTING: dict[str, type[EvictingLayer]] = {kind.__name__: kind for kind in (EvictingLayer, ScoredLayer, AdaptiveLayer)}
CACHES: dict[str, type[KVCache]] = {
    name: kind
    for name, kind in {**vars(recipes), "CompressedCache": CompressedCache, "PagedCache": PagedCache}.items()
    if isinstance(kind, type) and issubclass(kind, KVCache)
}


class NotThisPool(ValueError):
    """The pool is at fault, not the file."""


@torch.inference_mode(False)
def load(path: Path, model: object, pool: PagePool | None = None) -> KVCache:
    """The cache that `cache.save(path)` wrote, for the same model: `generate` goes on with it to the same tokens.

    Args:
        path: the file.
        model: the model that the cache was for, or its config. It is routed through kvplug, as by a cache's
            constructor. What is loaded lies on the devices of the model's layers, for a config on the CPU.
        pool: where the pages of a paged cache are from, of the page size and codec that it was saved with; None for a
            pool of its own.

    Returns:
        A cache of the kind that was saved.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is none of `cache.save`, is damaged, was written by a newer version, or belongs to another model;
            or `model` or `pool` is not one that such a cache can be used with. Nothing was changed.
        OutOfPages: the pool is bounded and full. Nothing was changed.
    """
    configs_of(model)  # raises for what is neither
    header, tensors = files.read(path)
    found = fingerprint(model)
    try:
        told = differences(header["model"], found)
        layers = [] if told else _layers(header["layers"], tensors, model, pool)
        kind, warned = CACHES.get(header["cache"], KVCache), header["warned"]
    except NotThisPool:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise refusal(path, f"holds what this kvplug can't use ({type(error).__name__}: {error})") from error
    if told:
        raise refusal(
            path, f"is a cache of another model: {'; '.join(told)}", "the model that it was saved with is accepted"
        )
    if any(isinstance(layer, CompressedLayer) for layer in layers):
        attach(model)
    else:
        # Routes the model, or says why that can't be.
        owned = [layer for layer in layers if isinstance(layer, KVLayer)]
        borrowed = {i: layer.index for i, layer in enumerate(layers) if isinstance(layer, BorrowedLayer)}
        KVCache(model, policy=[layer.policy for layer in owned], share=groups(borrowed))
    cache = kind.from_layers(layers)
    cache.fingerprint, cache._warned = found, warned
    return cache


def _layers(entries: list[dict], tensors: dict[str, torch.Tensor], model: object, pool: PagePool | None) -> list:
    """The layers of a cache for a model, from what a file says of them.

    Raises:
        ValueError: the model's layers are others, or something is not known or does not fit.
    """
    borrowed = {i: entry["owner"] for i, entry in enumerate(entries) if entry["kind"] == BorrowedLayer.__name__}
    policies = [made(POLICIES, entry["policy"]) for entry in _owning(entries).values()]
    codecs, pool = _pool(entries, model, pool)
    layers = make_layers(model, None, policies, layer_codecs=codecs, pool=pool, share=groups(borrowed))
    kinds = [None if isinstance(layer, KVLayer | BorrowedLayer) else type(layer).__name__ for layer in layers]
    saved = [entry["kind"] if entry["theirs"] else None for entry in entries]
    if kinds != saved:
        raise ValueError(
            f"beside full attention the cache has layers of the kinds {saved}, and this transformers gives the model "
            f"{kinds}; the version that the cache was saved with is accepted"
        )
    devices = _devices(model)
    groups_of: dict[int, Group] = {}
    default = next(reversed(devices.values()), torch.device("cpu"))
    for i, entry in enumerate(entries):
        state = part_of((tensors, {str(i): entry}), str(i))
        device = devices.get(i, default)
        if i in borrowed:
            continue
        if entry["theirs"]:
            load_theirs(layers[i], state, device)
        elif pool is not None:
            layers[i].load_state((state[0], entry["state"]), device)
        elif entry["kind"] == JointLayer.__name__:
            layers[i] = _joint_layer(groups_of, state, device)
        else:
            layers[i] = _layer(layers[i], state, device)
    lend(layers, borrowed, compat.readers(model if isinstance(model, PreTrainedConfig) else model.config))
    return layers


def _owning(entries: list[dict]) -> dict[int, dict]:
    """What a file says of the layers of ours that hold something, by the layer's index."""
    kind = BorrowedLayer.__name__
    return {i: entry for i, entry in enumerate(entries) if not entry["theirs"] and entry["kind"] != kind}


def _pool(entries: list[dict], model: object, pool: PagePool | None) -> tuple[dict[int, tuple], PagePool | None]:
    """The codecs of each layer and the pool of a paged cache; none for others.

    Raises:
        ValueError: the pool is of another page size or codec, or the cache is in no pages.
    """
    ours = _owning(entries)
    [size] = {entry.get("page_size") for entry in ours.values()}
    if size is None:
        if pool is not None:
            raise NotThisPool(
                f"pool={pool!r} is for a cache that was saved in pages, as this one was not; None is accepted"
            )
        return {}, None
    codecs = {i: tuple(made(CODEC_KINDS, entry[side]) for side in ("keys", "values")) for i, entry in ours.items()}
    first = next(iter(codecs.values()))
    if pool is not None and not isinstance(pool, PagePool):
        raise NotThisPool(f"pool={pool!r} is not accepted; a kvplug.PagePool, or None for one of its own")
    if pool is not None:
        pool.check_model(fingerprint(model))
    if pool is None:
        return codecs, PagePool(model, size, first)
    if (pool.page_size, pool.codec) != (size, first):
        names = ", ".join(codec.name for codec in first)
        raise NotThisPool(f"pool={pool!r} is not accepted; the cache needs one of page_size={size} and codec ({names})")
    return codecs, pool


def _layer(blank: KVLayer, state: State, device: torch.device) -> KVLayer:
    """A layer of ours. `blank` knows the policy and the rotation."""
    tensors, entry = state
    kind, plain = entry["kind"], entry["state"]
    keys, values = (made(CODEC_KINDS, entry[side]) for side in ("keys", "values"))
    if kind in EVICTING:
        layer = EVICTING[kind](keys, values, blank.policy, blank.rope)
    elif kind == "ResidualLayer":
        layer = ResidualLayer(keys, values, entry["residual"], entry["sinks"])
    elif kind == "CompressedLayer":
        context = HeadStore(keys, values, plain["shape"][1], ("positions",))
        like = SimpleNamespace(dtype=dtype_named(plain["dtype"]), device=device, shape=plain["shape"])
        layer = CompressedLayer(CompressedStore(keys, values, context, plain["store"]["first"]), like)
    elif kind == "KVLayer":
        layer = KVLayer(keys, values)
    else:
        raise ValueError(f"a layer of the kind {kind!r} is not known")
    layer.load_state((tensors, plain), device)
    return layer


def _joint_layer(groups_of: dict[int, Group], state: State, device: torch.device) -> JointLayer:
    """A layer that is stored together with others, of one of the groups, which its first layer begins."""
    tensors, entry = state
    if entry["member"] == 0:
        codecs = []
        for side in ("keys", "values"):
            basis = copied(tensors, f"basis.{side}", device)
            codecs.append(made(CODEC_KINDS, entry[side], **({} if basis is None else {"basis": basis})))
        groups_of[entry["group"]] = Group(*codecs, entry["members"], entry["group"])
    layer = JointLayer(groups_of[entry["group"]], entry["member"], entry["residual"], entry["sinks"])
    layer.load_state((tensors, entry["state"]), device)
    return layer


def _devices(model: object) -> dict[int, torch.device]:
    """The device of each layer's attention, by the layer's index; of what has no index the model's, last."""
    if isinstance(model, PreTrainedConfig):
        return {}
    own = getattr(model, "device", torch.device("cpu"))
    found: dict[int, torch.device] = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int):
            for weight in itertools.islice(module.parameters(), 1):
                # Weights that are fetched for each forward tell nothing.
                found[index] = own if weight.is_meta else weight.device
    return {**found, -1: torch.device("cpu") if own.type == "meta" else own}
