"""The stores by name. Adding one is a file and a line here."""

from __future__ import annotations

from kvplug.stores.base import Held, State, Store
from kvplug.stores.contiguous import ContiguousStore, check_finite
from kvplug.stores.ragged import RaggedStore
from kvplug.stores.residual import ResidualStore
from kvplug.stores.slots import Admission, admit

STORES: dict[str, type[Store]] = {"contiguous": ContiguousStore, "residual": ResidualStore}

__all__ = [
    "STORES",
    "Admission",
    "ContiguousStore",
    "Held",
    "RaggedStore",
    "ResidualStore",
    "State",
    "Store",
    "admit",
    "check_finite",
]
