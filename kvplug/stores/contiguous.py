"""One buffer a field, `[batch, kv_heads, capacity, width]`, grown by slabs.

A step writes its own tokens and nothing else: the buffers are copied only when they grow, and under an evicting policy
they stop growing at the budget and slots are written over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvplug.codecs import CODECS, Codec, Encoded, Field, Plain
from kvplug.stores.base import Held, Part, State, Store, expect
from kvplug.stores.slots import Admission

SLAB = 256
# Tokens up to which both sides are encoded in one pass: what costs there is the number of operations.
FEW = 64

# A key channel this many times louder than the median one is too much for a few bits.
OUTLIER = 30.0
# First tokens of a block that are left out where there are twice as many: those of a text are unlike all others.
FIRST = 4

# What may be told of each slot beside its bytes: the logical position of its token, and its score.
TABLES = {"positions": (torch.int32, -1), "scores": (torch.float32, 0)}

# Buffers must be ordinary tensors even when they are made under `torch.inference_mode`: a later step may run outside of
# it, and would not be allowed to write to them.
ordinary_tensors = torch.inference_mode(False)


def capacity_for(tokens: int, limit: int | None = None) -> int:
    """Capacity of a buffer that holds `tokens`: a function of the length alone, so that it can be planned.

    Spare capacity is below 256 tokens, or below 1/32 of what is used once that is more. `limit` is the policy's budget.
    """
    slab = max(SLAB, 1 << max(tokens // 32, 1).bit_length() - 1)
    capacity = -(-tokens // slab) * slab
    return capacity if limit is None else min(capacity, limit)


class Side:
    """The buffers of one side, keys or values."""

    def __init__(self, codec: Codec):
        self.codec = codec
        self.dim = 0
        self.fields: dict[str, Field] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def allocate(self, x: torch.Tensor) -> None:
        self.dim = x.shape[-1]
        self.codec.check(self.dim)
        batch, heads = x.shape[:2]
        self.fields = {f.name: f for f in self.codec.fields(self.dim, x.dtype)}
        self.buffers = {
            f.name: torch.zeros(batch, heads // f.share, 0, f.width, dtype=f.dtype, device=x.device)
            for f in self.fields.values()
        }

    def reserve(self, used: int, capacity: int) -> None:
        # One buffer at a time: the old one is freed before the next grows.
        for name, f in self.fields.items():
            self.buffers[name] = grown(self.buffers[name], f.rows(used), f.rows(capacity))

    def write(self, start: int, block: dict[str, torch.Tensor]) -> None:
        """Writes encoded tokens from slot `start` on, a multiple of the codec's granule."""
        for name, rows in block.items():
            self.buffers[name].narrow(2, start // self.fields[name].every, rows.shape[2]).copy_(rows)

    def view(self, start: int, length: int) -> Encoded:
        return Encoded(self.codec, self.buffers, self.dim).narrow(start, length)


def grown(buffer: torch.Tensor, used: int, capacity: int, fill: int = 0) -> torch.Tensor:
    """A copy of the buffer with room for `capacity` tokens."""
    shape = (*buffer.shape[:2], capacity, *buffer.shape[3:])
    larger = buffer.new_full(shape, fill) if fill else buffer.new_zeros(shape)
    larger[:, :, :used] = buffer[:, :, :used]
    return larger


def check_finite(keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises ValueError where a number is not finite. On a CPU alone: elsewhere looking would make the device wait."""
    for name, x in (("key_states", keys), ("value_states", values)):
        if x.device.type == "cpu" and not x.isfinite().all():
            raise ValueError(
                f"{name} has numbers that are not finite, which can't be encoded; finite numbers are accepted"
            )


def check_shapes(keys: torch.Tensor, values: torch.Tensor, shape: tuple[int, int, int, int] | None) -> None:
    """Raises ValueError where the keys and values of a forward are not `[batch, kv_heads, tokens, width]`, or fit
    neither each other nor a cache of the `shape` batch, kv_heads, key and value width."""
    for name, x in (("key_states", keys), ("value_states", values)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; [batch, kv_heads, tokens, head_dim] is accepted")
    got = (*keys.shape[:2], keys.shape[-1], values.shape[-1])
    if keys.shape[:3] != values.shape[:3] or (shape is not None and got != shape):
        held = f"a cache of batch, kv_heads, key and value width {shape}" if shape else "each other"
        raise ValueError(
            f"key_states {tuple(keys.shape)} and value_states {tuple(values.shape)} do not fit {held}; "
            "call reset() to use the cache for another batch, or kvplug.prefill(…, rows=…) to go on in more rows"
        )


def has_outlier(keys: torch.Tensor) -> bool:
    """Whether in any row and head of `[batch, kv_heads, tokens, dim]` a channel's RMS is `OUTLIER` times the median."""
    if keys.shape[2] > 2 * FIRST:
        keys = keys[:, :, FIRST:]
    rms = keys.float().square().mean(2).sqrt()
    median = rms.median(-1).values
    return bool(((rms.amax(-1) > OUTLIER * median) & (median > 0)).any())


class ContiguousStore(Store):
    """Grows in place. Where there is a table of positions slots are reused, and it tells which token each holds.

    Args:
        keys, values: the codec of each side.
        limit: most slots that may be in use, None for any number.
        tables: names of `TABLES` that are kept, `[rows, heads, slots]`; positions are shared by all rows and heads
            until `part` is called.
    """

    def __init__(self, keys: Codec, values: Codec, limit: int | None = None, tables: tuple[str, ...] = ()):
        self.codecs = (keys, values)
        self.keys, self.values = Side(keys), Side(values)
        self.limit, self.told = limit, tables
        # Whether a first block was searched for channels that few bits can't hold.
        self.searched = False
        self.length = 0
        self.capacity = 0
        self.tables: dict[str, torch.Tensor] = {}

    @property
    def positions(self) -> torch.Tensor | None:
        return self.table("positions")

    @property
    def scores(self) -> torch.Tensor | None:
        return self.table("scores")

    def table(self, name: str) -> torch.Tensor | None:
        """What the table `name` says of the slots in use, None where there is no such table."""
        return self.tables[name][..., : self.length] if name in self.tables else None

    @ordinary_tensors
    def allocate(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys.allocate(keys)
        self.values.allocate(values)
        self.length = self.capacity = 0
        self.searched = False
        self._allocate_tables(keys)

    def _allocate_tables(self, keys: torch.Tensor) -> None:
        for name in self.told:
            shape = (1, 1, 0) if name == "positions" else (*keys.shape[:2], 0)
            self.tables[name] = torch.empty(shape, dtype=TABLES[name][0], device=keys.device)

    @ordinary_tensors
    def reserve(self, length: int) -> None:
        """Makes room for `length` slots; what is new is empty."""
        if length <= self.capacity:
            return
        capacity = capacity_for(length, self.limit)
        for side in (self.keys, self.values):
            side.reserve(self.length, capacity)
        self._reserve_tables(capacity)

    @ordinary_tensors
    def _reserve_tables(self, capacity: int) -> None:
        for name, table in self.tables.items():
            self.tables[name] = grown(table, self.length, capacity, fill=TABLES[name][1])
        self.capacity = capacity

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[dict, dict]:
        """The fields of both sides. The first block decides whether few bits can hold the keys at all."""
        if not self.searched:
            self.search(keys)
        one, other = self.keys.codec, self.values.codec
        few = keys.shape[2] <= FEW and keys.shape == values.shape
        if one != other or not few or isinstance(one, Plain):
            return one.encode(keys).fields, other.encode(values).fields
        both = one.encode(torch.cat([keys, values])).fields
        return tuple({name: half[i] for name, half in ((n, x.chunk(2)) for n, x in both.items())} for i in (0, 1))

    @ordinary_tensors
    def search(self, keys: torch.Tensor) -> None:
        """Full precision for all keys where those of the first block have channels that few bits can't hold."""
        self.searched = True
        if self._too_loud(keys):
            self.keys = Side(CODECS["dense"])
            self.keys.allocate(keys)
            self.keys.reserve(0, self.capacity)

    def _too_loud(self, keys: torch.Tensor) -> bool:
        # A plan has shapes alone.
        return not (keys.is_meta or self.keys.codec.bits == Plain.bits) and has_outlier(keys)

    @property
    def kept_plain(self) -> bool:
        """Whether outliers were found and the keys are kept in the model's dtype."""
        return self.keys.codec != self.codecs[0]

    def append(self, keys: torch.Tensor, values: torch.Tensor, start: int | None = None) -> None:
        """Encodes and adds tokens after those that are there; `start` is the logical position of the first one."""
        tokens = keys.shape[2]
        self.reserve(self.length + tokens)
        blocks = self.encode(keys, values)
        for side, encoded in zip((self.keys, self.values), blocks, strict=True):
            self._write(side, encoded)
        if "positions" in self.tables:
            table, first = self.tables["positions"], self.length if start is None else start
            numbers = torch.arange(first, first + tokens, dtype=torch.int32, device=table.device)
            table.narrow(2, self.length, tokens).copy_(numbers)
        self.length += tokens

    def _write(self, side: Side, encoded: dict[str, torch.Tensor]) -> None:
        """Writes encoded tokens after those that are there."""
        side.write(self.length, encoded)

    def append_rows(self, keys: torch.Tensor, values: torch.Tensor, rows: torch.Tensor, places: torch.Tensor) -> None:
        """Encodes tokens `[len(rows), kv_heads, most tokens, head_dim]` of some rows, and writes them to these.

        Args:
            rows: int64 on the host, the rows of the batch.
            places: int64 `[len(rows), 2]` on the host: the slot from which on a row's tokens are written, a multiple
                of the granule, and how many there are; what is given beyond them is left out.
        """
        blocks = self.encode(keys, values)
        length = max(self.length, int(places.sum(-1).max()))
        self.reserve(length)
        for start, count in places.unique(dim=0).tolist():
            same = (places == torch.tensor([start, count])).all(-1).nonzero()[:, 0]
            for side, block in zip((self.keys, self.values), blocks, strict=True):
                for name, x in block.items():
                    f, buffer = side.fields[name], side.buffers[name]
                    first, wanted = start // f.every, f.rows(count)
                    buffer[rows[same].to(buffer.device), :, first : first + wanted] = x[same.to(x.device), :, :wanted]
        self.length = length

    def put(
        self, keys: torch.Tensor, values: torch.Tensor, admission: Admission, scores: torch.Tensor | None = None
    ) -> None:
        """Encodes the new tokens that stay and writes each to its slot (see `Admission`), with its score."""
        slots, valid = admission.slots, admission.valid
        batch, heads, tokens = keys.shape[:3]
        if tokens > 1:
            source = admission.source[..., None].expand(batch, heads, -1, -1)
            keys, values = (x.gather(2, source.expand(-1, -1, -1, x.shape[-1])) for x in (keys, values))
        blocks = self.encode(keys, values)
        for side, encoded in zip((self.keys, self.values), blocks, strict=True):
            self._scatter(side, encoded, slots, valid)
        told = {"positions": admission.positions}
        if scores is not None:
            told["scores"] = scores.gather(2, admission.source.expand(batch, heads, -1))
        for name, x in told.items():
            table = self.tables[name]
            index, x = slots.expand(*table.shape[:2], -1), x.to(table.dtype)
            if valid is not None:
                x = torch.where(valid, x, table.gather(2, index))
            table.scatter_(2, index, x.expand_as(index))

    def _scatter(self, side: Side, encoded: dict[str, torch.Tensor], slots: torch.Tensor, valid) -> None:
        """Writes encoded tokens, `[rows, heads, moves, width]` a field, to their slots, where `valid` says so."""
        for name, block in encoded.items():
            buffer = side.buffers[name]
            index = slots[..., None].expand_as(block)
            if valid is not None:
                block = torch.where(valid[..., None], block, buffer.gather(2, index))
            buffer.scatter_(2, index, block)

    @ordinary_tensors
    def part(self, rows: int, heads: int = 1) -> None:
        """Gives each of `rows` rows, and each of `heads` heads, positions of its own."""
        table = self.tables["positions"]
        shape = max(table.shape[0], rows), max(table.shape[1], heads)
        if shape != table.shape[:2]:
            self.tables["positions"] = table.expand(*shape, -1).clone()

    def parts(self) -> list[Part]:
        return [Part(0, *self.view(0, self.length))]

    def view(self, start: int, length: int) -> tuple[Encoded, Encoded]:
        return self.keys.view(start, length), self.values.view(start, length)

    def truncate(self, length: int) -> None:
        for name, table in self.tables.items():
            table[..., length : self.length] = TABLES[name][1]
        self.length = length

    @ordinary_tensors
    def drop_from(self, position: int) -> None:
        """Empties every slot that holds a token of logical position `position` or later."""
        gone = self.tables["positions"] >= position
        for name, table in self.tables.items():
            self.tables[name] = table.masked_fill(gone, TABLES[name][1])

    @ordinary_tensors
    def _map(self, change) -> None:
        for side in (self.keys, self.values):
            for name in side.buffers:
                side.buffers[name] = change(side.buffers[name])

    @ordinary_tensors
    def _rows(self, change) -> None:
        """Changes the rows of the tables; one that all rows share stays."""
        for name, table in self.tables.items():
            if table.shape[0] > 1 or name != "positions":
                self.tables[name] = change(table)

    def select(self, rows: torch.Tensor) -> None:
        def take(x: torch.Tensor) -> torch.Tensor:
            return x.index_select(0, rows.to(x.device))

        self._map(take)
        self._rows(take)

    def repeat(self, repeats: int) -> None:
        self._map(lambda x: x.repeat_interleave(repeats, dim=0))
        self._rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def to(self, device: torch.device | str) -> None:
        self._map(lambda x: x.to(device, non_blocking=True))
        self.tables = {name: table.to(device, non_blocking=True) for name, table in self.tables.items()}

    def reset(self) -> None:
        self.__init__(*self.codecs, self.limit, self.told)

    def state(self) -> State:
        found = self._tables_state()
        for side, encoded in zip(("keys", "values"), self.view(0, self.length), strict=True):
            found |= {f"{side}.{name}": x for name, x in encoded.fields.items()}
        return found, {"length": self.length, "searched": self.searched, "kept_plain": self.kept_plain}

    def _tables_state(self) -> dict[str, torch.Tensor]:
        return {f"tables.{name}": self.table(name) for name in self.tables}

    @ordinary_tensors
    def load_state(self, state: State, keys: torch.Tensor, values: torch.Tensor) -> None:
        tensors, plain = state
        length = plain["length"]
        if plain["kept_plain"]:
            self.keys = Side(CODECS["dense"])
        self.allocate(keys, values)
        self.reserve(length)
        for name, side in (("keys", self.keys), ("values", self.values)):
            block = {}
            for f in side.fields.values():
                shape = keys.shape[0], keys.shape[1] // f.share, f.rows(length), f.width
                x = tensors[f"{name}.{f.name}"]
                block[f.name] = expect(f"{name}.{f.name}", x, shape, f.dtype)
            side.write(0, block)
        self._load_tables(tensors, length, keys.device)
        self.length, self.searched = length, plain["searched"]

    def _load_tables(self, tensors: dict[str, torch.Tensor], length: int, device: torch.device) -> None:
        self.capacity = capacity_for(length, self.limit)
        for name, (dtype, empty) in TABLES.items():
            if name in self.tables:
                table = expect(f"tables.{name}", tensors[f"tables.{name}"], (None, None, length), dtype)
                self.tables[name] = grown(table.to(device), length, self.capacity, fill=empty)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from self.keys.buffers.values()
        yield from self.values.buffers.values()
        yield from self.tables.values()

    def held(self) -> Held:
        return self._held(self.length, self.capacity)

    def _held(self, used: int, slots: int) -> Held:
        """Bytes where each side has `slots` slots in all, of which `used` are in use."""
        found = {"keys": 0, "values": 0, "scales": 0}
        total = 0
        for name, side in (("keys", self.keys), ("values", self.values)):
            for f in side.fields.values():
                buffer = side.buffers[f.name]
                row = buffer.shape[0] * buffer.shape[1] * f.width * buffer.itemsize
                found[name if f.kind == "codes" else "scales"] += f.rows(used) * row
                total += f.rows(slots) * row
        told = {"tables": 0, "scores": 0}
        for name, table in self.tables.items():
            told["scores" if name == "scores" else "tables"] += self.table(name).numel() * table.itemsize
            total += table.numel() * table.itemsize
        return Held(**found, **told, spare=total - sum(found.values()) - sum(told.values()))
