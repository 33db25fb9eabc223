"""What a cache holds, counted to the byte: the report that both the measured and the planned figures come in.

Nothing is left out: scales, zero points, position tables and spare capacity are bytes too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from kvplug.layer import KVLayer
from kvplug.sharing import BorrowedLayer


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache, by kind, for the whole batch and all layers. What layers share counts once.

    A page that several rows hold counts once. The books of a pool do not count: 8 bytes on the host for each page of a
    row, and as many for each slot that has to be gathered.

    Attributes:
        keys, values: the codes; for full precision the K and V themselves.
        scales: scales and zero points.
        residual: tokens kept in the model's dtype beside the codes, those of an unfinished forward included.
        tables: logical positions of slots, counts of padding, states of linear attention.
        scores: state of eviction policies.
        spare: capacity that is reserved and holds nothing. Of a pool that several caches are in, only the rest of this
            one's own last pages.
        tokens_seen: tokens a row has been given.
        tokens_kept: token slots in use for a row, a mean over the layers that hold any where they differ.
        elements: scalars of K and V that are kept, for the whole batch.
        batch: rows.
        dense_total: bytes of all tokens seen in the model's dtype, as `DynamicCache` holds them, for each layer.
    """

    keys: int = 0
    values: int = 0
    scales: int = 0
    residual: int = 0
    tables: int = 0
    scores: int = 0
    spare: int = 0
    tokens_seen: int = 0
    tokens_kept: float = 0
    elements: int = 0
    batch: int = 0
    dense_total: int = 0

    @property
    def total(self) -> int:
        """All bytes held."""
        return self.used + self.spare

    @property
    def used(self) -> int:
        """All bytes but spare capacity."""
        return self.keys + self.values + self.scales + self.residual + self.tables + self.scores

    @property
    def bytes_per_token(self) -> float:
        """Bytes for one token kept, over all layers; spare capacity left out."""
        return self.used / (self.tokens_kept * self.batch) if self.tokens_kept and self.batch else 0.0

    @property
    def bits_per_element(self) -> float:
        """Bits for one scalar of K or V that is kept, scales and tables included; spare capacity left out."""
        return 8 * self.used / self.elements if self.elements else 0.0

    @property
    def ratio(self) -> float:
        """`total` as a share of `dense_total`: 0.25 is a quarter of the memory."""
        return self.total / self.dense_total if self.dense_total else 0.0

    def __str__(self) -> str:
        parts = ", ".join(
            f"{name} {human(value)}"
            for name in ("keys", "values", "scales", "residual", "tables", "scores", "spare")
            if (value := getattr(self, name))
        )
        kept = f"{self.tokens_kept:g} of {self.tokens_seen} tokens kept"
        rows = f" in each of {self.batch} rows" if self.batch > 1 else ""
        return (
            f"{human(self.total)} held ({parts or 'nothing'}); {kept}{rows}; "
            f"{self.bits_per_element:.2f} bits an element; full precision would hold {human(self.dense_total)} "
            f"({self.ratio:.1%})"
        )


def human(count: int) -> str:
    """A number of bytes in the largest unit, of those in steps of 1024, that leaves it at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def measure(layers: Iterable[object]) -> MemoryReport:
    """Counts the layers of a cache, ours and those of transformers; one that is listed twice counts twice."""
    layers = list(layers)
    for layer in layers:
        # All before any is counted: some are encoded together.
        if isinstance(layer, KVLayer):
            layer.settle()
    total = dict.fromkeys((f.name for f in fields(MemoryReport)), 0)
    kept, ours = 0, 0
    for layer, times in _counted(layers):
        if isinstance(layer, KVLayer):
            part = _ours(layer)
            kept += part.pop("kept") * times
            ours += layer.is_initialized * times
        elif isinstance(layer, BorrowedLayer):
            told = _ours(layer.owner)
            part = {name: told[name] for name in ("tokens_seen", "batch", "dense_total") if name in told}
        else:
            part = _theirs(layer)
        for name, value in part.items():
            total[name] = max(total[name], value) if name in ("tokens_seen", "batch") else total[name] + value * times
    mean = kept / ours if ours else 0
    total["tokens_kept"] = int(mean) if mean == int(mean) else mean
    return MemoryReport(**total)


def _counted(layers: Iterable[object]) -> list[tuple[object, int]]:
    """Each layer once, and how often it is listed."""
    found: dict[int, tuple[object, int]] = {}
    for layer in layers:
        found[id(layer)] = (layer, found.get(id(layer), (layer, 0))[1] + 1)
    return list(found.values())


def _ours(layer: KVLayer) -> dict[str, int]:
    if not layer.is_initialized:
        return {"kept": 0, "tables": layer.store.basis_bytes}
    held = layer.store.held()
    batch, heads, key_dim, value_dim = layer.shape
    token = batch * heads * (key_dim + value_dim)
    small = [t for t in (layer.padding, layer._real) if t is not None]
    return {
        "keys": held.keys,
        "values": held.values,
        "scales": held.scales,
        "residual": held.residual + sum(_storage(x)[1] for x in layer.fresh or ()),
        "tables": held.tables + sum(_storage(x)[1] for x in small),
        "scores": held.scores + sum(_storage(x)[1] for x in layer.policy_state),
        "spare": held.spare,
        "tokens_seen": layer.seen,
        "kept": layer.kept,
        "elements": token * layer.kept,
        "batch": batch,
        "dense_total": token * layer.seen * layer.dtype.itemsize,
    }


def _theirs(layer: object) -> dict[str, int]:
    """A layer of transformers': keys and values of a sliding window, or the states of linear attention."""
    found: dict[str, int] = {}
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if isinstance(keys, torch.Tensor) and keys.ndim == 4:
        for name, x in (("keys", keys), ("values", values)):
            used = x.numel() * x.itemsize
            found[name] = used
            found["spare"] = found.get("spare", 0) + _storage(x)[1] - used
        found["elements"] = keys.numel() + values.numel()
        found["dense_total"] = found["keys"] + found["values"]
        found["tokens_seen"], found["batch"] = layer.get_seq_length(), keys.shape[0]
    states = [
        x
        for name in ("conv_states", "recurrent_states")
        for x in getattr(layer, name, {}).values()
        if isinstance(x, torch.Tensor)
    ]
    window = getattr(layer, "_sliding_window_tensor", None)
    if states or window is not None:
        found["tables"] = sum(_storage(x)[1] for x in [*states, *([window] if window is not None else [])])
        found["dense_total"] = found.get("dense_total", 0) + found["tables"]
    return found


def _storage(x: torch.Tensor) -> tuple[int, int]:
    storage = x.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
