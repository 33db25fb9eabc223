"""The buffers that pages of some layers lie in, and the books: which pages are free, and how often each is held."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from kvplug.codecs import Codec
from kvplug.stores.contiguous import Side, ordinary_tensors


class Holder:
    """What holds pages of an arena."""

    @property
    def holds(self) -> bool:
        """Whether it holds any."""
        raise NotImplementedError

    def held_pages(self) -> Iterable[int]:
        """Every page that is held, as often as it is."""
        raise NotImplementedError

    def rename(self, names: torch.Tensor) -> None:
        """Page i is called `names[i]` from now on."""
        raise NotImplementedError


class Arena:
    """The pages of some layers of a model, and the buffers `[1, kv_heads, pages * page_size, width]` that they lie in.

    Attributes:
        refs: how many rows of tables, and entries of an index, hold each page; int64 on the host. 0: it is free.
        sides: keys and values of each layer, by its index in the model.
        shapes: heads, widths of keys and values, dtype of the model and device of each layer.
        live: the layers that have something in their buffers.
        holders: what holds pages, told when they are numbered anew: see `Holder`.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.refs = torch.zeros(0, dtype=torch.int64)
        self.sides: dict[int, tuple[Side, Side]] = {}
        self.shapes: dict[int, tuple[int, int, int, torch.dtype, torch.device]] = {}
        self.live: set[int] = set()
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict) -> Arena:
        return self

    @ordinary_tensors
    def __getstate__(self) -> dict:
        # Who holds pages in the copy says so when it is made.
        return vars(self) | {"refs": torch.zeros_like(self.refs), "holders": None}

    @ordinary_tensors
    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, holders=weakref.WeakSet(), refs=state["refs"].clone())

    @property
    def capacity(self) -> int:
        return len(self.refs)

    @property
    def held(self) -> int:
        """Pages that somebody holds."""
        return int(self.refs.count_nonzero())

    @property
    def shared(self) -> bool:
        """Whether several hold pages."""
        return sum(holder.holds for holder in list(self.holders)) > 1

    # The buffers

    def token_bytes(self, index: int) -> int:
        """Bytes of a token in a layer, 0 where that is not known yet."""
        return sum(x.shape[1] * x.shape[3] * x.itemsize for side in self.sides[index] for x in side.buffers.values())

    def layer(self, index: int, keys: Codec, values: Codec) -> None:
        """Makes room in the books for a layer."""
        self.sides.setdefault(index, (Side(keys), Side(values)))

    @ordinary_tensors
    def allocate(self, index: int, codecs: tuple[Codec, Codec], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Takes shapes, dtype and device of a layer from a first block.

        Raises:
            ValueError: the pool holds pages of the layer that are of another shape.
        """
        held, new = self.sides[index], tuple(Side(codec) for codec in codecs)
        if index in self.live:
            new = tuple(Side(side.codec) for side in held)
        for side, x in zip(new, (keys, values), strict=True):
            side.allocate(x[:1])
        if index not in self.live:
            self.sides[index] = new
            self.shapes[index] = keys.shape[1], keys.shape[3], values.shape[3], keys.dtype, keys.device
            return
        for name, one, other in zip(("keys", "values"), held, new, strict=True):
            if _shapes(one) != _shapes(other):
                raise ValueError(
                    f"{name} of layer {index} take {_shapes(other)}, but the pool holds pages of {_shapes(one)}: one "
                    "pool is for one model in one dtype on one device"
                )

    @ordinary_tensors
    def touch(self, index: int) -> None:
        """Gives a layer its buffers before it is written to."""
        if index not in self.live:
            for side in self.sides[index]:
                side.reserve(0, self.capacity * self.page_size)
            self.live.add(index)

    def _buffers(self) -> Iterable[tuple[Side, str]]:
        for index in self.live:
            for side in self.sides[index]:
                for name in side.buffers:
                    yield side, name

    def by_page(self, buffer: torch.Tensor) -> torch.Tensor:
        """A buffer as `[1, kv_heads, pages, page_size, width]`."""
        return buffer.unflatten(2, (-1, self.page_size))

    @ordinary_tensors
    def grow(self, capacity: int) -> None:
        """Room for `capacity` pages. Pages move: those of each row come to lie side by side."""
        old = dict.fromkeys(page for holder in list(self.holders) for page in holder.held_pages())
        order = torch.tensor(list(old), dtype=torch.int64)
        rename = torch.full((self.capacity,), -1)
        rename[order] = torch.arange(len(order))
        still = bool((order == torch.arange(len(order))).all())
        for side, name in self._buffers():
            before = side.buffers[name]
            after = before.new_zeros(*before.shape[:2], capacity * self.page_size, before.shape[3])
            if len(order):
                pages = self.by_page(before)
                moved = pages[:, :, : len(order)] if still else pages.index_select(2, order.to(before.device))
                self.by_page(after)[:, :, : len(order)] = moved
            side.buffers[name] = after
        refs = self.refs.new_zeros(capacity)
        refs[: len(order)] = self.refs[order]
        self.refs = refs
        for holder in list(self.holders):
            holder.rename(rename)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies pages in all layers."""
        indices: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for side, name in self._buffers():
            pages = self.by_page(side.buffers[name])
            if pages.device not in indices:
                indices[pages.device] = source.to(pages.device), target.to(pages.device)
            one, other = indices[pages.device]
            pages.index_copy_(2, other, pages.index_select(2, one))

    # The books

    def take(self, count: int, after: int = -1) -> torch.Tensor:
        """Free pages, which are then held once: those after page `after` if they are free, else side by side where
        there is such a place."""
        if after >= 0 and after + count < self.capacity and not self.refs[after + 1 : after + 1 + count].any():
            found = torch.arange(after + 1, after + 1 + count)
        else:
            free = (self.refs == 0).nonzero()[:, 0]
            starts = (free[count - 1 :] - free[: len(free) - count + 1] == count - 1).nonzero()[:, 0] if count else free
            first = int(starts[0]) if len(starts) else 0
            found = free[first : first + count]
        self.refs[found] = 1
        return found

    def hold(self, pages: torch.Tensor) -> None:
        self.refs.index_add_(0, pages.flatten(), torch.ones(pages.numel(), dtype=torch.int64))

    def release(self, pages: torch.Tensor) -> None:
        """Gives pages back; an arena of which nobody holds a page any more has no memory."""
        self.refs.index_add_(0, pages.flatten(), torch.full((pages.numel(),), -1))
        if not self.refs.any():
            self._empty()

    @ordinary_tensors
    def _empty(self) -> None:
        for side, name in self._buffers():
            side.buffers[name] = side.buffers[name][:, :, :0].clone()
        self.live.clear()
        self.refs = self.refs.new_zeros(0)

    def check(self) -> None:
        """Raises AssertionError where the books do not agree with what is held."""
        # Kept until the end: what is collected meanwhile would be counted and then give its pages back.
        holders = list(self.holders)
        counted = torch.zeros_like(self.refs)
        for holder in holders:
            pages = torch.tensor(list(holder.held_pages()), dtype=torch.int64)
            if len(pages) and not (int(pages.min()) >= 0 and int(pages.max()) < self.capacity):
                raise AssertionError(f"{holder!r} holds pages that do not exist: {pages.tolist()}")
            counted.index_add_(0, pages, torch.ones(len(pages), dtype=torch.int64))
        wrong = (counted != self.refs).nonzero()[:, 0]
        if len(wrong):
            page = int(wrong[0])
            raise AssertionError(
                f"page {page} is held {int(counted[page])} times, and the books say {int(self.refs[page])}"
            )
        for side, name in self._buffers():
            slots = side.buffers[name].shape[2]
            if slots != self.capacity * self.page_size:
                raise AssertionError(f"{slots} slots of {name} for {self.capacity} pages of {self.page_size}")


def _shapes(side: Side) -> list[tuple]:
    return [(name, x.shape[1], x.shape[3], x.dtype, str(x.device)) for name, x in side.buffers.items()]
