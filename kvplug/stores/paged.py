"""A store whose slots lie in the pages of a pool, so that rows, and caches, can share what they have in common.

The buffers of a layer are one run of slots `[1, kv_heads, pages * page_size, width]`: pages that lie side by side are
read where they are, as if they were one block.
"""

from __future__ import annotations

import warnings

import torch

from kvplug.codecs import CODECS, Codec, Encoded
from kvplug.stores.base import Held, Part, State, expect
from kvplug.stores.contiguous import ContiguousStore, Side, capacity_for, ordinary_tensors
from kvplug.stores.pages import Pages
from kvplug.stores.tables import Run, Table, Want


class PagedStore(ContiguousStore):
    """The slots of one layer in the pages of a table that it shares with the layers that keep equally many tokens.

    Args:
        pool: where the pages are from.
        table: the rows' pages.
        index: number of the layer in the model.
        keys, values, limit, tables: as for `ContiguousStore`; each token is written by itself.
    """

    def __init__(
        self,
        pool: Pages,
        table: Table,
        index: int,
        keys: Codec,
        values: Codec,
        limit: int | None = None,
        tables: tuple[str, ...] = (),
    ):
        self.pool, self.pages, self.index = pool, table, index
        table.arena.layer(index, keys, values)
        self._begin((keys, values), limit, tables)

    def _begin(self, codecs: tuple[Codec, Codec], limit: int | None, told: tuple[str, ...]) -> None:
        self.codecs, self.limit, self.told = codecs, limit, told
        self.length = self.capacity = 0
        self.tables: dict[str, torch.Tensor] = {}
        self.turn = self.pages.turn
        self.searched = False

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.pages.arena.sides[self.index]

    @property
    def keys(self) -> Side:
        return self.sides[0]

    @property
    def values(self) -> Side:
        return self.sides[1]

    @property
    def length(self) -> int:
        return self.pages.lengths[self.index]

    @length.setter
    def length(self, length: int) -> None:
        self.pages.lengths[self.index] = length

    @ordinary_tensors
    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.pages.arena.allocate(self.index, self.codecs, keys, values)
        self.turn = self.pages.turn
        self.length = self.capacity = 0
        self.rows = keys.shape[0]
        self.shape = self.pages.arena.shapes[self.index]
        self._allocate_tables(keys)

    @ordinary_tensors
    def search(self, keys: torch.Tensor) -> None:
        self.searched = True
        if not self._too_loud(keys):
            return
        if self.index not in self.pages.arena.live:
            self._keep_plain(keys)
            return
        warnings.warn(
            f"the keys of layer {self.index} have channels so large that few bits can't hold the others, and the pool "
            "has keys of the layer in few bits already: this cache will be far from the model. A pool of its own is "
            "accepted",
            stacklevel=2,
        )

    def _keep_plain(self, keys: torch.Tensor) -> None:
        arena, loud = self.pages.arena, Side(CODECS["dense"])
        loud.allocate(keys[:1])
        arena.sides[self.index] = loud, self.values
        arena.live.discard(self.index)

    def check_pool(self) -> None:
        """Raises ValueError where the pool took up tokens of another shape while this store held none."""
        if self.pages.arena.shapes[self.index] != self.shape:
            raise ValueError(
                f"layer {self.index} takes {self.shape}, but the pool holds pages of "
                f"{self.pages.arena.shapes[self.index]}: one pool is for one model in one dtype on one device"
            )

    def reserve(self, length: int) -> None:
        """Makes room for `length` slots, of which those past the ones in use are to be written."""
        self._need(self.length, length)
        if length > self.capacity:
            self._reserve_tables(capacity_for(length, self.limit))

    def _need(self, first: int, length: int) -> None:
        if not self.pages.may_write(first, length):
            self.pool.serve([Want(self.pages, self.rows, first, length)])

    def _write(self, side: Side, encoded: dict[str, torch.Tensor]) -> None:
        self.pages.arena.touch(self.index)
        for name, rows in encoded.items():
            buffer, tokens = side.buffers[name], rows.shape[2]
            slots = self.pages.slots(self.length, self.length + tokens, buffer.device)
            # The rows of the batch one after the other.
            rows = rows.transpose(0, 1).flatten(1, 2)[None]
            if isinstance(slots, int):
                buffer.narrow(2, slots, rows.shape[2]).copy_(rows)
            else:
                buffer.index_copy_(2, slots, rows)

    def _scatter(self, side: Side, block: dict[str, torch.Tensor], slots: torch.Tensor, valid) -> None:
        self._need(0, self.length)
        self.pages.arena.touch(self.index)
        heads = next(iter(block.values())).shape[1]
        # [rows, heads, moves] → [1, heads, rows * moves]
        index = self.pages.located(slots).expand(-1, heads, -1).transpose(0, 1).flatten(1)[None]
        told = None if valid is None else valid.expand(self.rows, heads, -1).transpose(0, 1).flatten(1)[None]
        flat = {name: rows.transpose(0, 1).flatten(1, 2)[None] for name, rows in block.items()}
        super()._scatter(side, flat, index, told)

    # Reading

    def parts(self) -> list[Part]:
        """What is stored, as it lies: slots that reused ones are among are read as one."""
        whole = bool(self.told)
        runs = self.pages.runs(self.length, self._device, whole)
        return [
            Part(run.start, *(self._read(side, run) for side in (self.keys, self.values)), run.sharing) for run in runs
        ]

    @property
    def _device(self) -> torch.device:
        return next(iter(self.keys.buffers.values())).device

    def view(self, start: int, length: int) -> tuple[Encoded, Encoded]:
        """Keys and values of the slots `start : start + length` of every row; copied where rows share pages or theirs
        lie apart."""
        if self.length == 0:
            return tuple(self._nothing(side) for side in (self.keys, self.values))
        [run] = self.pages.runs(self.length, self._device, whole=True)
        return tuple(self._read(side, run).narrow(start, length) for side in (self.keys, self.values))

    def _nothing(self, side: Side) -> Encoded:
        empty = {name: x[:, :, :0].expand(self.rows, -1, -1, -1) for name, x in side.buffers.items()}
        return Encoded(side.codec, empty, side.dim)

    def _read(self, side: Side, run: Run) -> Encoded:
        return Encoded(side.codec, {name: self._pick(x, run) for name, x in side.buffers.items()}, side.dim)

    def _pick(self, buffer: torch.Tensor, run: Run) -> torch.Tensor:
        """`[rows to be read, kv_heads, tokens, width]` of a buffer."""
        tokens = run.stop - run.start
        if run.index is not None:
            return buffer[0].index_select(1, run.index).unflatten(1, (run.rows, tokens)).transpose(0, 1)
        page = self.pages.page_size * buffer.stride(2)
        shape = run.rows, buffer.shape[1], tokens, buffer.shape[3]
        strides = run.stride * page, *buffer.stride()[1:]
        return buffer.as_strided(shape, strides, buffer.storage_offset() + run.base * page)

    # Changes of rows and lengths

    def truncate(self, length: int) -> None:
        super().truncate(length)
        self.pages.trim()

    def select(self, rows: torch.Tensor) -> None:
        self._select_pages(rows)
        self._rows(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, repeats: int) -> None:
        self._select_pages(torch.arange(self.rows).repeat_interleave(repeats))
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _select_pages(self, rows: torch.Tensor) -> None:
        self.turn += 1
        self.rows = len(rows)
        self.pages.select(rows, self.turn)

    def reset(self) -> None:
        self._begin(self.codecs, self.limit, self.told)
        self.pages.trim()

    # Files

    def state(self) -> State:
        """What the pages hold, each once, and which of them each row has; the last ones with what is spare in them."""
        pages = self._tables_state()
        if self.pages.pages is not None:
            unique, own = self.pages.pages.unique(return_inverse=True)
            pages["pages"] = own
            for side, held in zip(("keys", "values"), self.sides, strict=True):
                for name, x in held.buffers.items():
                    pages[f"{side}.{name}"] = self.pages.arena.by_page(x).index_select(2, unique.to(x.device))
        return pages, {"length": self.length, "searched": self.searched, "kept_plain": self.kept_plain}

    @ordinary_tensors
    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        tensors, plain = state
        arena, length = self.pages.arena, plain["length"]
        self.allocate(keys, values)
        if plain["kept_plain"] and not self.kept_plain:
            if self.index in arena.live:
                raise ValueError(
                    f"layer {self.index} has its keys in full precision, and the pool has them in few bits already"
                )
            self._keep_plain(keys)
        self.searched = plain["searched"]
        if "pages" in tensors:
            own = expect("pages", tensors["pages"], (keys.shape[0], None), torch.int64)
            count = int(own.max()) + 1
            if self.pages.pages is None:
                self.pool.found(self.pages, own)
            names = torch.zeros(count, dtype=torch.int64)
            names[own.flatten()] = self.pages.pages.flatten()
            arena.touch(self.index)
            for side, held in zip(("keys", "values"), self.sides, strict=True):
                for f in held.fields.values():
                    name, buffer = f"{side}.{f.name}", held.buffers[f.name]
                    shape = 1, buffer.shape[1], count, arena.page_size, f.width
                    x = expect(name, tensors[name], shape, f.dtype).to(buffer.device)
                    arena.by_page(buffer).index_copy_(2, names.to(buffer.device), x)
        self._load_tables(tensors, length, keys.device)
        self.length = length

    def held(self) -> Held:
        return self._held(*self._counts())

    def _counts(self) -> tuple[int, int]:
        """Slots in use and slots held, for all rows; what is free in the arena is held where no other cache is in it.

        A page that several rows hold counts once.
        """
        table, arena = self.pages, self.pages.arena
        columns = table.columns_for(self.length)
        if table.pages is None or columns == 0:
            used = pages = 0
        else:
            whole, last = (len(x.unique()) for x in (table.pages[:, : columns - 1], table.pages[:, columns - 1]))
            used = whole * arena.page_size + last * (self.length - (columns - 1) * arena.page_size)
            pages = len(table.pages.unique())
        if not arena.shared:
            pages += arena.capacity - arena.held
        return used, pages * arena.page_size
