"""Which layer owns the keys and values that a layer reads, and how the others get to read them.

A layer that borrows stores nothing and changes nothing: whatever is asked of it is what its owner says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers.cache_utils import CacheLayerMixin

from kvplug.stores import check_shapes
from kvplug.view import KVTensor

Groups = str | Sequence[Sequence[int]]
ACCEPTED = "'cla2', 'cla3' and so on, 'yoco', or lists of layers such as [[0, 1], [2, 3]] are accepted"


def owners(groups: Groups, full: Sequence[int]) -> dict[int, int]:
    """The layer that owns what a layer reads, for each layer that borrows.

    Args:
        groups: "cla2" for pairs of neighbours, "cla3" for threes and so on (Brandon et al., "Reducing Transformer
            Key-Value Cache Size with Cross-Layer Attention", 2024, arXiv:2405.12981); "yoco" for one group of the upper
            half (Sun et al., "You Only Cache Once", 2024, arXiv:2405.05254); or lists of layers, by their index in the
            model. The first layer of a group owns; one that no group names owns its own.
        full: the layers that can share, in order.

    Raises:
        ValueError: `groups` is neither, or names a layer that can't share, twice, or before its owner.
    """
    borrowed: dict[int, int] = {}
    seen: set[int] = set()
    for group in _named(groups, full) if isinstance(groups, str) else _listed(groups):
        for layer in group:
            if isinstance(layer, bool) or not isinstance(layer, int) or layer not in full:
                raise ValueError(
                    f"groups={groups!r}: layer {layer!r} is not a full-attention layer; accepted: "
                    f"{', '.join(map(str, full))}"
                )
            if layer in seen:
                raise ValueError(f"groups={groups!r} has layer {layer} twice; once is accepted")
            seen.add(layer)
            if layer < group[0]:
                raise ValueError(
                    f"groups={groups!r}: layer {layer} runs before layer {group[0]}, whose keys and values it would "
                    "read; the owner, which comes first in a group, must be its lowest layer"
                )
            if layer != group[0]:
                borrowed[layer] = group[0]
    return borrowed


def groups(borrowed: Mapping[int, int]) -> list[list[int]]:
    """The inverse of `owners`: the groups, without layers that are alone."""
    found: dict[int, list[int]] = {}
    for layer, owner in sorted(borrowed.items()):
        found.setdefault(owner, [owner]).append(layer)
    return [found[owner] for owner in sorted(found)]


def _named(groups: str, full: Sequence[int]) -> list[Sequence[int]]:
    if groups == "yoco":
        return [full[len(full) // 2 :]]
    size = groups.removeprefix("cla")
    if groups == size or not size.isdecimal() or int(size) < 2:
        raise ValueError(f"groups={groups!r} is not known; {ACCEPTED}")
    return [full[i : i + int(size)] for i in range(0, len(full), int(size))]


def _listed(groups: object) -> list[Sequence[int]]:
    ok = isinstance(groups, list | tuple) and all(isinstance(group, list | tuple) and group for group in groups)
    if not ok:
        raise ValueError(f"groups={groups!r} is not accepted; {ACCEPTED}")
    return list(groups)


class Readers:
    """How far the layers that read what one layer holds are with a forward.

    What is stored must not change before the last of them has attended to it.

    Attributes:
        borrowers: layers of the cache that get the forward's keys and values from here.
        others: layers to which the model itself hands them on.
    """

    def __init__(self, others: int = 0):
        self.borrowers, self.others = 0, others
        # Forwards up to now, and the tokens of the last one.
        self.forward = self.tokens = 0
        self._left = self._untaken = 0
        # What attention over the forward reads, until all borrowers have it.
        self.shown: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def attending(self) -> int:
        """Layers that attend to a forward's keys and values, their owner among them."""
        return 1 + self.borrowers + self.others

    def show(self, shown: tuple[torch.Tensor, torch.Tensor], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Begins a forward of so many tokens, over which attention reads `shown`; gives that back."""
        self.forward, self.tokens = self.forward + 1, tokens
        self._left, self._untaken = self.attending, self.borrowers
        self.shown = shown if self.borrowers else None
        return shown

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What a borrower reads of the forward."""
        shown = self.shown
        self._untaken -= 1
        if self._untaken <= 0:
            self.shown = None
        # Handles of its own: each pair tells once that it was read.
        return KVTensor.of(shown[0].kv) if isinstance(shown[0], KVTensor) else shown

    @property
    def waiting(self) -> bool:
        """Whether layers are still to attend to the forward."""
        return self._left > 0

    def end(self) -> None:
        """The forward is over, whoever has not read it."""
        self._left, self.shown = 0, None

    def __getstate__(self) -> dict[str, object]:
        # A copy is not in the middle of a forward.
        return {**vars(self), "_left": 0, "shown": None}

    def attended(self) -> bool:
        """Notes that a layer has attended to the forward; whether that was the last one."""
        self._left -= 1
        return self._left <= 0


class BorrowedLayer(CacheLayerMixin):
    """A layer that reads the keys and values of another one.

    Args:
        owner: a `KVLayer` that comes before it.
        index: the owner's in the model.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self, owner, index: int):
        # Not the base's __init__: `keys` and `values` are the owner's.
        self.index = index
        self._forward = 0
        self.read(owner)

    def read(self, owner) -> None:
        """Reads from `owner`, a new one that was made alike, from now on."""
        self.owner = owner
        if owner.readers is None:
            owner.readers = Readers()
        owner.readers.borrowers += 1

    def __repr__(self) -> str:
        return f"BorrowedLayer(of layer {self.index})"

    @property
    def _due(self) -> bool:
        """Whether the owner has tokens of a forward that were not read here."""
        readers = self.owner.readers
        return self._forward != readers.forward and readers.shown is not None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is held."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """What the queries of a forward attend to: the owner's keys and values. Those that are given are not used.

        Raises:
            ValueError: the owner was not given the tokens of this forward, or their shape is another.
        """
        readers, shape = self.owner.readers, self.owner.shape
        if not self._due:
            raise ValueError(
                f"this layer reads the keys and values of layer {self.index}, which has none of this forward: each "
                "forward must give them to that layer first, and to this one once"
            )
        check_shapes(key_states, value_states, shape)
        if key_states.shape[2] != readers.tokens:
            raise ValueError(
                f"key_states {tuple(key_states.shape)} has {key_states.shape[2]} tokens, and layer {self.index}, whose "
                f"keys and values this one reads, got {readers.tokens}; as many are accepted"
            )
        self._forward = readers.forward
        shown = readers.take()
        if shown[0].device != key_states.device:
            shown = tuple(x.to(key_states.device) for x in shown)
        return shown

    # What the owner says

    @property
    def seen(self) -> int:
        """Tokens of the forwards that were read here."""
        return self.owner.seen - (self.owner.readers.tokens if self._due else 0)

    @property
    def is_initialized(self) -> bool:
        return self.owner.is_initialized

    @property
    def is_croppable(self) -> bool:
        return self.owner.is_croppable

    @property
    def keys(self) -> torch.Tensor | None:
        return self.owner.keys

    @property
    def values(self) -> torch.Tensor | None:
        return self.owner.values

    def get_seq_length(self) -> int:
        return self.owner.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self.owner.get_max_length()

    # What the owner does

    def activate_past_recording(self) -> None: ...

    def crop(self, tokens_to_remove: int) -> None: ...

    def reset(self) -> None: ...

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None: ...

    def batch_select_indices(self, indices: torch.Tensor) -> None: ...

    def batch_repeat_interleave(self, repeats: int) -> None: ...

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...
