"""Layers, codecs and policies as tensors and JSON, and back: what a saved cache is made of.

Names are looked up in tables of ours. Must never import, call or unpack what a file names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

import torch

from kvplug import codecs
from kvplug.codecs import Codec
from kvplug.joint import JointLayer
from kvplug.layer import KVLayer
from kvplug.policies import POLICIES, Policy
from kvplug.sharing import BorrowedLayer
from kvplug.stores import PagedStore, State
from kvplug.stores.base import dtype_named

CODEC_KINDS: dict[str, type[Codec]] = {
    name: kind
    for name, kind in vars(codecs).items()
    if isinstance(kind, type) and issubclass(kind, Codec) and kind is not Codec
}
# What can be saved and built again.
LAYER_KINDS = (
    "KVLayer",
    "ResidualLayer",
    "EvictingLayer",
    "ScoredLayer",
    "AdaptiveLayer",
    "CompressedLayer",
    "JointLayer",
)
# Whose layers build them again by themselves.
STORE_KINDS = ("ContiguousStore", "ResidualStore", "RaggedStore", "HeadStore", "CompressedStore", "PagedStore")


def described(part: Codec | Policy | None) -> dict[str, object] | None:
    """A codec or policy by its name and fields, tensors left out.

    Raises:
        ValueError: it is none of kvplug's own.
    """
    if part is None:
        return None
    kinds = CODEC_KINDS if isinstance(part, Codec) else POLICIES
    for name, kind in kinds.items():
        if type(part) is kind:
            found = {f.name: getattr(part, f.name) for f in fields(part)}
            found = {key: described(x) if isinstance(x, Codec) else x for key, x in found.items()}
            return {"name": name, "fields": {key: x for key, x in found.items() if not isinstance(x, torch.Tensor)}}
    raise ValueError(f"{part!r} can't be saved; one of {', '.join(kinds)} is accepted")


def made(
    kinds: Mapping[str, type], described: dict[str, object] | None, **tensors: torch.Tensor
) -> Codec | Policy | None:
    """The inverse of `described`, for one of `kinds`; `tensors` are what it left out, by name.

    Raises:
        ValueError: the name is not known, or a field is not valid.
    """
    if described is None:
        return None
    name = described["name"]
    if name not in kinds:
        raise ValueError(f"{name!r} is not known; {', '.join(kinds)} are accepted")
    values = {key: made(kinds, x) if isinstance(x, dict) else x for key, x in described["fields"].items()}
    return kinds[name](**values, **tensors)


def finish_copies(layers: list) -> None:
    """Waits for what `offload` copies to the host, which goes on by itself."""
    found = {device for layer in layers if (device := getattr(layer, "device", None)) is not None}
    for device in found:
        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)


def layer_state(layer: object) -> State:
    """All that makes a layer of a cache, ours or one of transformers'.

    Raises:
        ValueError: the layer, its policy or a codec is of a kind that kvplug can't build again.
    """
    kind = type(layer).__name__
    if isinstance(layer, BorrowedLayer):
        return {}, {"kind": kind, "theirs": False, "owner": layer.index}
    if not isinstance(layer, KVLayer):
        tensors: dict[str, torch.Tensor] = {}
        return tensors, {"kind": kind, "theirs": True, "state": _packed(vars(layer), "", tensors)}
    if kind not in LAYER_KINDS:
        raise ValueError(f"a layer of the kind {kind} can't be saved; {', '.join(LAYER_KINDS)} are accepted")
    store = layer.store
    if type(store).__name__ not in STORE_KINDS:
        raise ValueError(f"a {type(store).__name__} can't be saved; {', '.join(STORE_KINDS)} are accepted")
    tensors, plain = layer.state()
    keys, values = (described(codec) for codec in store.codecs)
    made_with = {"keys": keys, "values": values, "policy": described(layer.policy)}
    made_with |= {name: getattr(store, name) for name in ("residual", "sinks") if hasattr(store, name)}
    if isinstance(layer, JointLayer):
        made_with |= {"group": layer.group.number, "member": layer.index, "members": layer.group.joint.members}
    if isinstance(store, PagedStore):
        made_with["page_size"] = store.pages.page_size
    return tensors, {"kind": kind, "theirs": False, **made_with, "state": plain}


def load_theirs(layer: object, state: State, device: torch.device) -> None:
    """Gives a new layer of transformers' the attributes that `layer_state` found in one that was made alike.

    Raises:
        ValueError: this transformers keeps other ones in such a layer.
    """
    tensors, plain = state
    own = vars(layer)
    found = {name: _unpacked(x, tensors, device) for name, x in plain["state"].items()}
    for name in own.keys() | found.keys():
        # What a layer only has once it was used is no part of its class.
        known = name in found and (name in own or not hasattr(type(layer), name))
        if not known or isinstance(own.get(name), dict) != isinstance(found[name], dict):
            raise ValueError(
                f"a {type(layer).__name__} of this transformers has no attribute {name!r} of that kind; the version "
                "that the cache was saved with is accepted"
            )
    own.update(found)


def _packed(x: object, name: str, tensors: dict[str, torch.Tensor]) -> object:
    """An attribute as JSON; tensors go to `tensors`, the device is left to whoever loads."""
    if isinstance(x, torch.Tensor):
        tensors[name] = x
        return {"tensor": name}
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device):
        return {"device": None}
    if isinstance(x, dict):
        inner = {key: _packed(value, f"{name}.{key}" if name else str(key), tensors) for key, value in x.items()}
        return {"dict": list(inner.items())} if name else inner
    if x is None or isinstance(x, bool | int | float | str):
        return x
    raise ValueError(f"{name}={x!r} of a layer of transformers' can't be saved; numbers and tensors are accepted")


def _unpacked(x: object, tensors: dict[str, torch.Tensor], device: torch.device) -> object:
    if not isinstance(x, dict):
        return x
    [(kind, inner)] = x.items()
    if kind == "tensor":
        return tensors[inner].to(device, copy=True)
    if kind == "dtype":
        return dtype_named(inner)
    if kind == "device":
        return device
    return {key: _unpacked(value, tensors, device) for key, value in inner}
