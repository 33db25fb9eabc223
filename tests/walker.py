"""An independent count of what an object holds: every tensor that can be reached from it, each storage once.

The numbers of pages are left out, as reports leave them out: they lie on the host, 8 bytes for a page of a row.
"""

import torch

from kvplug.stores.arena import Arena
from kvplug.stores.tables import Table

BOOKS = {Arena: ("refs",), Table: ("pages", "_known")}


def tensors(root):
    """All tensors reachable from `root` through attributes, slots and containers."""
    seen, todo = set(), [root]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (str, bytes, int, float, type, torch.nn.Module, torch.dtype)):
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
        elif isinstance(thing, dict):
            todo += [*thing.keys(), *thing.values()]
        elif isinstance(thing, (list, tuple, set, frozenset)):
            todo += thing
        books = BOOKS.get(type(thing), ())
        todo += [value for name, value in getattr(thing, "__dict__", {}).items() if name not in books]
        todo += [getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name)]
        closure = getattr(thing, "__closure__", None) or ()
        todo += [cell.cell_contents for cell in closure]
    return


def bytes_held(root):
    """Bytes of the unique storages behind `tensors(root)`."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(root)}
    return sum(size for pointer, size in storages.items() if pointer)
