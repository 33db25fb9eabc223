"""The stores by name. Adding one is a file and a line here."""

from __future__ import annotations

from kvplug.stores.base import Held, State, Store
from kvplug.stores.contiguous import ContiguousStore, check_finite, check_shapes
from kvplug.stores.paged import PagedStore
from kvplug.stores.pages import OutOfPages, Pages
from kvplug.stores.ragged import RaggedStore
from kvplug.stores.residual import ResidualStore
from kvplug.stores.slots import Admission, admit
from kvplug.stores.tables import Want

STORES: dict[str, type[Store]] = {"contiguous": ContiguousStore, "paged": PagedStore, "residual": ResidualStore}

__all__ = [
    "STORES",
    "Admission",
    "ContiguousStore",
    "Held",
    "OutOfPages",
    "PagedStore",
    "Pages",
    "RaggedStore",
    "ResidualStore",
    "State",
    "Store",
    "Want",
    "admit",
    "check_finite",
    "check_shapes",
]
