"""Layers that are stored together: each has its own first and last tokens, and what is encoded is encoded jointly.

A layer's tokens wait in its tail until the last layer of the group has attended to the same ones. Drops nothing, so it
must never be given a policy.
"""

from __future__ import annotations

import weakref

import torch

from kvplug.codecs import Codec
from kvplug.layer import KVLayer
from kvplug.residual import ResidualLayer
from kvplug.stores import State
from kvplug.stores.joint import JointStore


class Group:
    """The layers that are stored together, and the store that they share.

    Args:
        keys, values: the codec of each side, over the heads of all layers.
        members: how many layers.
        number: its own among the groups of a cache.
    """

    def __init__(self, keys: Codec, values: Codec, members: int, number: int):
        self.number = number
        self.joint = JointStore(keys, values, members)
        # Weak, so that a cache's memory is free as soon as nobody holds the cache.
        self._layers: list[weakref.ref | None] = [None] * members

    def __getstate__(self) -> dict[str, object]:
        # Copies of the layers make themselves known.
        return {**vars(self), "_layers": [None] * self.joint.members}

    def meet(self, layer: JointLayer) -> list[JointLayer]:
        """Notes that `layer` belongs here. All layers, if each has seen the same number of tokens, else none."""
        self._layers[layer.index] = weakref.ref(layer)
        layers = [known() if known is not None else None for known in self._layers]
        level = all(one is not None and one.is_initialized and one.seen == layer.seen for one in layers)
        return layers if level else []


class JointLayer(ResidualLayer):
    """A full-attention layer of a `KVCache` that is stored together with others.

    Args:
        group: what it shares with them.
        index: its number among them.
        residual, sinks: as for `ResidualLayer`.
    """

    def __init__(self, group: Group, index: int, residual: int, sinks: int):
        self.group, self.index = group, index
        super().__init__(*group.joint.codecs, residual, sinks, group.joint.member(index))

    def __repr__(self) -> str:
        of = f"{self.group.joint.members} layers"
        return f"JointLayer({self._codecs()}, {of}, residual={self.store.residual}, sinks={self.store.sinks})"

    @property
    def settings(self) -> tuple:
        return *super().settings, id(self.group), self.index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.group.meet(self)
        super().lazy_initialization(key_states, value_states)

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        super().check(key_states, value_states)
        where = self.store.encoded.device
        if self.index and not self.is_initialized and where is not None and where != key_states.device:
            raise ValueError(
                f"key_states is on {key_states.device}, and the layers that this one is stored together with are on "
                f"{where}; layers on one device are accepted"
            )

    def settle(self, mask: torch.Tensor | None = None, force: bool = False) -> None:
        """Once all layers of the group have attended to the same tokens, encodes the groups of tokens that have left
        the residual. Does nothing while the past is recorded, unless forced.

        Args:
            mask: the logical mask of the forward, from which padding is told.
        """
        if mask is not None and self.pending:
            self._note_padding(mask)
        layers = self.group.meet(self)
        told = next((layer._real for layer in layers if layer._real is not None), None)
        for layer in layers:
            if layer.pending:
                layer._real = told
            ResidualLayer.settle(layer, None, force)

    def state(self) -> State:
        tensors, plain = super().state()
        if self.index == 0:
            # Of a layer without tokens too.
            tensors |= {f"basis.{side}": x for side, x in self.group.joint.bases().items()}
        return tensors, plain

    @property
    def store_device(self) -> torch.device:
        own, joint = super().store_device, self.store.encoded.device
        return own if joint is None or own != self.device else joint

    def offload(self) -> None:
        """Moves what is stored to the host: that of all layers of the group, once the last one is asked to."""
        if self.index == self.group.joint.members - 1:
            self.settle()
            for layer in self.group.meet(self):
                KVLayer.offload(layer)
