"""Counts the bytes that a cache really holds, from outside: every tensor storage that can be reached from it, once.

Must never believe what a cache reports of itself: a view that pins a large tensor counts in full, and so does anything
that a cache forgot to free. The books of a pool of pages are left out, as kvplug's reports leave them out.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType

import torch

from kvplug.stores.arena import Arena
from kvplug.stores.tables import Table

# These lead out of the cache into code that is shared by the whole program.
LEAVES = (str, bytes, int, float, bool, complex, type, ModuleType, FunctionType, BuiltinFunctionType, torch.dtype)

# Numbers of pages, 8 bytes for a page of a row, and where the slots of pages that lie apart are.
BOOKS = {Arena: ("refs",), Table: ("pages", "_known")}


def counted(cache, model, tokens: int) -> dict:
    """What `cache` holds after `tokens` tokens, as every result tells it.

    Measured from outside for every cache; kvplug's own report stands beside it, and `report_agrees` compares the two.
    """
    held = held_bytes(cache, outside=model)
    own = cache.memory() if hasattr(cache, "memory") else None
    return {
        "held_bytes": held,
        "bytes_per_token": held / tokens,
        "bits_stored": own.bits_per_element if own else None,
        "drops_tokens": bool(own and own.tokens_kept < own.tokens_seen),
        "tokens_seen": tokens,
        "report": asdict(own) if own else None,
        "report_agrees": own.total == held if own else None,
        # Keys and values of a kvplug cache would be decoded to be looked at.
        "elements": None if own else elements(cache),
    }


def beside(own: dict, full: dict) -> dict:
    """The memory of a cache, as `counted` gives it, beside that of the full cache after the same tokens.

    Returns:
        `own` with `elements` (scalars of K and V in the full cache), `bits_held` (bits held for each of them, None
        where there are none) and `of_full` (bytes held, as a share of the full cache's).
    """
    elements = full["elements"]
    bits = 8 * own["held_bytes"] / elements if elements else None
    return {**own, "elements": elements, "bits_held": bits, "of_full": own["held_bytes"] / full["held_bytes"]}


def elements(cache) -> int:
    """Scalars of K and V in one of transformers' caches; a layer whose state is of another kind has none."""
    parts = (getattr(layer, side, None) for layer in cache.layers for side in ("keys", "values"))
    return sum(x.numel() for x in parts if x is not None)


def start_peak(device: torch.device) -> int:
    """Starts to watch the device's memory; returns what is allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_since(device: torch.device, before: int) -> int | None:
    """The most bytes that were allocated on the device at once, above `before`; None where no allocator counts."""
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def held_bytes(cache: object, *, outside: object = None) -> int:
    """Bytes of all unique tensor storages reachable from `cache`.

    Args:
        cache: any object; attributes, slots, lists, dicts, tuples and sets are followed, tensor subclasses to the
            tensors inside them.
        outside: an object whose storages are not the cache's, such as the model that it belongs to.
    """
    elsewhere = set(storages(outside))
    return sum(size for key, size in storages(cache).items() if key not in elsewhere)


def storages(root: object) -> dict[tuple, int]:
    """Every tensor storage reachable from `root`: where it lies, and its size in bytes."""
    found: dict[tuple, int] = {}
    seen: set[int] = set()
    # The objects themselves are kept until the end: an id may be reused once its object is gone.
    alive: list[object] = []
    pending = [root]
    while pending:
        item = pending.pop()
        if item is None or isinstance(item, LEAVES) or id(item) in seen:
            continue
        seen.add(id(item))
        alive.append(item)
        if isinstance(item, torch.Tensor):
            inner = list(_inner(item))
            if not inner:
                _count(item, found)
            pending.extend(inner)
        else:
            pending.extend(_children(item))
    return found


def _inner(tensor: torch.Tensor) -> Iterator[object]:
    """What a tensor subclass is made of; nothing for a plain tensor. Its own storage may be only a pretence."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return
    for value in vars(tensor).values():
        if isinstance(value, torch.Tensor) or not isinstance(value, LEAVES):
            yield value


def _count(tensor: torch.Tensor, found: dict[tuple, int]) -> None:
    if tensor.device.type == "meta":
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        found[(str(tensor.device), storage.data_ptr(), storage.nbytes())] = storage.nbytes()


def _children(item: object) -> Iterator[object]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, Iterable) and isinstance(item, (list, tuple, set, frozenset)):
        yield from item
    if isinstance(item, MethodType):
        yield item.__self__
    books = BOOKS.get(type(item), ())
    yield from (value for name, value in getattr(item, "__dict__", {}).items() if name not in books)
    for kind in type(item).__mro__:
        slots = getattr(kind, "__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            value = getattr(item, slot, None)
            if value is not None:
                yield value
