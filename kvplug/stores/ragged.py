"""A residual store whose rows hold different numbers of tokens: what a padded batch needs.

Every row is written as if it were alone: its sinks and groups count its own tokens, and it is flushed when it is due.
Which tokens are padding is known on the host, so that nothing here ever waits for a device but a crop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from kvplug.codecs import Encoded
from kvplug.stores.base import Held, State, expect, part_of
from kvplug.stores.contiguous import capacity_for, grown, ordinary_tensors
from kvplug.stores.residual import PLAIN, ResidualStore
from kvplug.view import Segment


class RaggedStore(ResidualStore):
    """Token number n of a row, padding not counted, is a sink if n < sinks, and lies in encoded slot n - sinks if
    n < `done`; the tail holds the row's last tokens in order of time. `positions` tells attention what a slot holds.

    On the host: `counts` and `done` `[batch]`, the tokens of a row and how many of them are sinks or encoded, and
    `columns` `[batch, dense slots]`, the logical position of what each slot holds, -1 for nothing.
    """

    @classmethod
    @ordinary_tensors
    def of(cls, store: ResidualStore) -> RaggedStore:
        """The same tokens in rows that may go on differently; takes the buffers of `store` over."""
        store._compact()
        ragged = cls(*store.codecs, store.residual, store.sinks, store.encoded)
        ragged.length = store.length
        capacity = store.sinks + store.room
        ragged.dense = [grown(x, x.shape[2], capacity) for x in store.dense]
        batch, device = store.dense[0].shape[0], store.dense[0].device
        ragged.counts = torch.full((batch,), store.length)
        ragged.done = torch.full((batch,), store.settled)
        ragged.columns = torch.full((batch, capacity), -1)
        sinks, ragged.used = min(store.length, store.sinks), max(store.length - store.settled, 0)
        ragged.columns[:, :sinks] = torch.arange(sinks)
        ragged._tail_columns()[:] = torch.arange(store.settled, store.settled + ragged.used)
        ragged._table, ragged._encoded_table = (
            torch.full((batch, 1, slots), -1, dtype=torch.int32, device=device)
            for slots in (capacity, store.encoded.capacity)
        )
        ragged._encoded_table[..., : store.encoded.length] = torch.arange(store.sinks, store.settled, device=device)
        ragged._tell_positions()
        return ragged

    def _tail_columns(self) -> torch.Tensor:
        return self.columns[:, self.sinks : self.sinks + self.used]

    def _tail(self) -> list[torch.Tensor]:
        return [x.narrow(2, self.sinks, self.used) for x in self.dense]

    def place(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Never in place: which of the tokens are padding is told with attention."""
        return False

    @ordinary_tensors
    def append(self, keys: torch.Tensor, values: torch.Tensor, real: torch.Tensor | None = None) -> None:
        """Adds the tokens of a forward to their rows and encodes the groups that are due.

        Args:
            real: bool `[batch, tokens]` on the host, False for padding; None where there is none.
        """
        tokens, before = keys.shape[2], self.counts
        new = torch.arange(self.length, self.length + tokens).expand(len(before), -1)
        if real is not None:
            new = torch.where(real, new, -1)
        counts = before + (new >= 0).sum(-1)
        moved = self.used + tokens > self.room
        if moved:
            self._keep(self._tail(), self._tail_columns(), (before - self.done).clamp(min=0))
            self._tell_positions()
        fits = self.used + tokens <= self.room
        columns = torch.cat([self._tail_columns(), new], dim=1)
        if fits:
            start = self.sinks + self.used
            for dense, x in zip(self.dense, (keys, values), strict=True):
                dense.narrow(2, start, tokens).copy_(x)
            pool = [x.narrow(2, self.sinks, self.used + tokens) for x in self.dense]
        else:
            pool = [torch.cat(pair, dim=2) for pair in zip(self._tail(), (keys, values), strict=True)]
        due = self.settled_at_each(counts)
        flushed = bool((due > self.done).any())
        if flushed:
            self._flush_rows(pool, columns, counts, due)
        grew = bool((before < self.sinks).any())
        if grew:
            self._fill_sinks(pool, columns, before, counts)
        if fits:
            self.columns[:, start : start + tokens] = new
            self.used += tokens
        else:
            self._keep(pool, columns, (columns >= 0).sum(-1).clamp(max=self.room))
        self.counts, self.length = counts, self.length + tokens
        if flushed or grew or real is not None or not fits:
            self._tell_positions()
        else:
            numbers = torch.arange(self.length - tokens, self.length, device=self._table.device)
            self._table[..., start : start + tokens] = numbers

    def settled_at_each(self, counts: torch.Tensor) -> torch.Tensor:
        """`settled_at` for the number of tokens of each row."""
        return self.sinks + self.group * ((counts - self.residual - self.sinks).clamp(min=0) // self.group)

    @staticmethod
    def _order(columns: torch.Tensor) -> torch.Tensor:
        """Numbers of the slots that hold something, in order of time, then the others: `[batch, slots]`."""
        return torch.argsort((columns < 0).to(torch.uint8), dim=-1, stable=True)

    def _pick(self, pool, columns: torch.Tensor, first: torch.Tensor, width: int, rows: torch.Tensor | None = None):
        """From each row of the pool `width` tokens, from the one that is number `first` among those it holds.

        Returns their columns `[rows, width]` and keys and values; past a row's last token they are that one again.
        """
        held = (columns >= 0).sum(-1, keepdim=True)
        index = (first[:, None] + torch.arange(width)).clamp(max=(held - 1)).clamp(min=0)
        slots = self._order(columns).gather(1, index)
        if rows is not None:
            pool, slots, columns = [x[rows.to(x.device)] for x in pool], slots[rows], columns[rows]
        where = slots.to(pool[0].device)[:, None, :, None]
        picked = [x.gather(2, where.expand(-1, x.shape[1], -1, x.shape[-1])) for x in pool]
        return columns.gather(1, slots), picked

    def _keep(self, pool, columns: torch.Tensor, kept: torch.Tensor) -> None:
        """Makes the last `kept` `[batch]` tokens that each row of the pool holds the tail."""
        width = int(kept.max())
        found, picked = self._pick(pool, columns, (columns >= 0).sum(-1) - kept, width)
        for dense, x in zip(self.dense, picked, strict=True):
            dense.narrow(2, self.sinks, width).copy_(x)
        self.columns[:, self.sinks :] = -1
        self.used = width
        self._tail_columns()[:] = torch.where(torch.arange(width) < kept[:, None], found, -1)

    def _fill_sinks(self, pool, columns: torch.Tensor, before: torch.Tensor, counts: torch.Tensor) -> None:
        """Copies the first tokens of rows that had not had all their sinks."""
        number, base = torch.arange(self.sinks), counts - (columns >= 0).sum(-1)
        found, picked = self._pick(pool, columns, -base, self.sinks)
        fresh = (number >= before[:, None]) & (number < counts[:, None])
        self.columns[:, : self.sinks] = torch.where(fresh, found, self.columns[:, : self.sinks])
        mask = fresh.to(pool[0].device)[:, None, :, None]
        for dense, x in zip(self.dense, picked, strict=True):
            dense[:, :, : self.sinks] = torch.where(mask, x, dense[:, :, : self.sinks])

    def _flush_rows(self, pool, columns: torch.Tensor, counts: torch.Tensor, due: torch.Tensor) -> None:
        """Encodes up to `due` tokens of each row: all rows in one go, then each to its place."""
        rows = (due > self.done).nonzero()[:, 0]
        more = (due - self.done)[rows]
        first = self.done - (counts - (columns >= 0).sum(-1))
        found, picked = self._pick(pool, columns, first, int(more.max()), rows)
        places = torch.stack([self.done[rows] - self.sinks, more], dim=1)
        self.encoded.append_rows(*picked, rows, places)
        length = int(due.max()) - self.sinks
        if self._encoded_table.shape[2] < length:
            self._encoded_table = grown(
                self._encoded_table, self._encoded_table.shape[2], capacity_for(length), fill=-1
            )
        table = self._encoded_table
        for start, count in places.unique(dim=0).tolist():
            same = (places == torch.tensor([start, count])).all(-1).nonzero()[:, 0]
            table[rows[same].to(table.device), 0, start : start + count] = found[same, :count].to(table)
        self.done = torch.maximum(self.done, due)

    def _tell_positions(self) -> None:
        """Writes anew what attention is told of the dense slots; tokens that are encoded by now are hidden."""
        tail = self._tail_columns()
        told = self.columns.clone()
        told[:, self.sinks : self.sinks + self.used] = torch.where(self._waiting(), tail, -1)
        self._table.copy_(told[:, None])

    def _waiting(self) -> torch.Tensor:
        """Which slots of the tail hold a token that is not encoded, bool `[batch, slots]`."""
        held = self._tail_columns() >= 0
        number = self.counts[:, None] - held.sum(-1, keepdim=True) + held.cumsum(-1) - 1
        return held & (number >= self.done[:, None])

    def segments(self) -> list[Segment]:
        found = []
        if self.encoded.length:
            encoded = self.encoded.view(0, self.encoded.length)
            found.append(Segment(*encoded, positions=self._encoded_table[..., : self.encoded.length]))
        slots = self.sinks + self.used
        if slots:
            dense = (PLAIN.encode(x[:, :, :slots]) for x in self.dense)
            found.append(Segment(*dense, positions=self._table[..., :slots]))
        return found

    @ordinary_tensors
    def truncate(self, length: int) -> None:
        """Keeps the first `length` columns; of each row as `ResidualStore` does."""
        # Only the device knows the columns of what is encoded, and a crop may wait for it.
        encoded = self._encoded_table[:, 0, : self.encoded.length].cpu().long()
        waiting = self._waiting() & (self._tail_columns() < length)
        self.columns[self.columns >= length] = -1
        counts = (self.columns[:, : self.sinks] >= 0).sum(-1) + waiting.sum(-1)
        counts += ((encoded >= 0) & (encoded < length)).sum(-1)
        due = self.settled_at_each(counts)
        undone = due >= counts - (self._tail_columns() >= 0).sum(-1)
        whole = self.sinks + self.group * ((counts - self.sinks).clamp(min=0) // self.group)
        done = torch.minimum(self.done, torch.where(undone, due, whole.where(counts < self.done, self.done)))
        for row in (~undone & (counts < self.done)).nonzero()[:, 0].tolist():
            self._decode_back(row, int(done[row]), int(counts[row]), encoded[row])
        self.counts, self.done, self.length = counts, done, length
        empty = torch.arange(self._encoded_table.shape[2]) >= (done - self.sinks)[:, None]
        self._encoded_table.masked_fill_(empty[:, None].to(self._encoded_table.device), -1)
        self.encoded.length = int(done.max()) - self.sinks
        self._tell_positions()

    def _decode_back(self, row: int, start: int, stop: int, columns: torch.Tensor) -> None:
        """Makes the tokens `start : stop` of a row its tail, from what is encoded of them."""
        self.columns[row, self.sinks :] = -1
        self.used = max(self.used, stop - start)
        if stop <= start:
            return
        first = start - self.sinks
        for side, dense in zip(self.encoded.view(first, stop - start), self.dense, strict=True):
            one = Encoded(side.codec, {name: x[row : row + 1] for name, x in side.fields.items()}, side.dim)
            dense[row, :, self.sinks : self.sinks + stop - start] = one.decode(dense.dtype)[0]
        self.columns[row, self.sinks : self.sinks + stop - start] = columns[first : first + stop - start]

    @ordinary_tensors
    def _rows(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for name in ("counts", "done", "columns", "_table", "_encoded_table"):
            setattr(self, name, change(getattr(self, name)))

    def select(self, rows: torch.Tensor) -> None:
        super().select(rows)
        self._rows(lambda x: x.index_select(0, rows.to(x.device)))

    def repeat(self, repeats: int) -> None:
        super().repeat(repeats)
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> None:
        super().to(device)
        for name in ("_table", "_encoded_table"):
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))

    @property
    def _in_use(self) -> int:
        return self.sinks + self.used

    def state(self) -> State:
        tensors, plain = super().state()
        tensors |= {"counts": self.counts, "done": self.done, "columns": self.columns[:, : self._in_use]}
        tensors["encoded_columns"] = self._encoded_table[..., : self.encoded.length]
        return tensors, {**plain, "used": self.used}

    @ordinary_tensors
    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        tensors, plain = state
        self.encoded.load_state(part_of(state, "encoded"), keys, values)
        self.length, self.used = plain["length"], plain["used"]
        batch, capacity, length = keys.shape[0], self.sinks + self.room, self.encoded.length
        self.dense = [x.new_zeros(*x.shape[:2], capacity, x.shape[3]) for x in (keys, values)]
        self._load_dense(tensors)
        # On the host, all but the tables.
        self.counts, self.done = (
            expect(name, tensors[name], (batch,), torch.long).to("cpu", copy=True) for name in ("counts", "done")
        )
        self.columns = torch.full((batch, capacity), -1)
        columns = expect("columns", tensors["columns"], (batch, self._in_use), torch.long)
        self.columns[:, : self._in_use] = columns
        table = expect("encoded_columns", tensors["encoded_columns"], (batch, 1, length), torch.int32)
        self._encoded_table = grown(table.to(keys.device), length, self.encoded.capacity, fill=-1)
        self._table = torch.full((batch, 1, capacity), -1, dtype=torch.int32, device=keys.device)
        self._tell_positions()

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from super().tensors()
        yield from (self._table, self._encoded_table, self.counts, self.done, self.columns)

    def held(self) -> Held:
        encoded = self.encoded.held()
        sizes = [(x.numel() * x.itemsize, x[:, :, : self.sinks + self.used].numel() * x.itemsize) for x in self.dense]
        dense, used = (sum(each) for each in zip(*sizes, strict=True))
        tables = sum(x.numel() * x.itemsize for x in list(self.tensors())[-5:])
        # The table of what is encoded grows with the codes, and what it has for their spare slots is spare too.
        told = self._encoded_table
        beyond = told[..., self.encoded.length :].numel() * told.itemsize
        tables += encoded.tables - beyond
        return replace(encoded, residual=used, tables=tables, spare=encoded.spare + dense - used + beyond)
