"""What attention reads: segments of stored tokens with the position of each slot, and the handle `update` returns.

A view lives for one layer of one forward. It never copies: it refers to the store's buffers and to the new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch.utils._pytree import tree_map

from kvplug.codecs import CODECS, Encoded, Plain


@dataclass(frozen=True)
class Sharing:
    """Which of fewer rows of keys and values each row of a batch reads.

    Attributes:
        which: int64 `[batch]`, the row that each reads.
        rows, readers: how many rows are read, and by how many rows of the batch at most.
        order: int64 `[rows * readers]`, the rows of the batch by what they read, filled up with any; None where they
            are in that order.
        place: int64 `[batch]`, where in `order` a row of the batch is; None as above.
    """

    which: torch.Tensor
    rows: int
    readers: int
    order: torch.Tensor | None
    place: torch.Tensor | None

    @classmethod
    def of(cls, which: torch.Tensor, rows: int, device: torch.device) -> Sharing:
        """From `which` on the host; the rest is made for `device`."""
        counts = which.bincount(minlength=rows)
        readers = int(counts.max())
        order = which.argsort(stable=True)
        first = counts.cumsum(0) - counts
        place = torch.empty_like(which)
        place[order] = which[order] * readers + torch.arange(len(which)) - first[which[order]]
        if readers * rows == len(which) and bool((place == torch.arange(len(which))).all()):
            return cls(which.to(device), rows, readers, None, None)
        filled = order[first].repeat_interleave(readers)
        filled[place] = torch.arange(len(which))
        return cls(which.to(device), rows, readers, filled.to(device), place.to(device))

    def together(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, n, m, …]` → `[rows, n, readers * m, …]`: what reads the same row side by side."""
        x = x if self.order is None else x.index_select(0, self.order)
        return x.unflatten(0, (self.rows, self.readers)).transpose(1, 2).flatten(2, 3)

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `together`."""
        x = x.unflatten(2, (self.readers, -1)).transpose(1, 2).flatten(0, 1)
        return x if self.place is None else x.index_select(0, self.place)


@dataclass(frozen=True)
class Segment:
    """Keys and values of some tokens.

    `positions` `[rows, kv_heads or 1, tokens]` (rows: batch or 1) holds each slot's logical position, -1 for an empty
    slot; None means that the first `sinks` slots hold the tokens 0 … sinks - 1, and the others consecutive tokens from
    `start` on. Where there are `owners` `[batch, pages]` the heads share the slots: keys and values have one row for
    all of them, and each page of slots belongs to the head that `owners` names (the number of heads: to nobody). With
    `sharing` there are fewer rows than in the batch, and it tells which each row reads.
    """

    keys: Encoded
    values: Encoded
    start: int = 0
    positions: torch.Tensor | None = None
    sinks: int = 0
    owners: torch.Tensor | None = None
    sharing: Sharing | None = None

    @property
    def tokens(self) -> int:
        return self.keys.tokens

    @property
    def batch(self) -> int:
        """Rows of the batch, or 1 where they are all alike."""
        return next(self.keys.tensors()).shape[0] if self.sharing is None else len(self.sharing.which)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Where there are no positions: runs of consecutive tokens in the slots, (first one, one past the last)."""
        runs = [(0, self.sinks), (self.start, self.start + self.tokens - self.sinks)]
        return [(start, stop) for start, stop in runs if stop > start] or runs[1:]

    def logical(self, device: torch.device) -> torch.Tensor:
        """The positions, written out."""
        if self.positions is not None:
            return self.positions.long()
        runs = [torch.arange(start, stop, device=device) for start, stop in self.runs]
        return (torch.cat(runs) if len(runs) > 1 else runs[0])[None, None]


@dataclass(frozen=True)
class Watch:
    """Who wants to see the attention of a forward.

    `take` is given the weights of some queries after the other, fp32 `[batch, kv_heads, group, queries, slots]` with
    zeros for those that don't count; where heads share slots it gets two, the first `[batch, pages, group, queries,
    page]`. What counts are the last `queries` ones of each row that are not padding, None for all.
    """

    queries: int | None
    take: Callable[..., None]

    def first(self, queries: int, counted: torch.Tensor | None) -> int:
        """The first query of a forward of `queries` that may count."""
        return 0 if self.queries is None or counted is not None else max(queries - self.queries, 0)


@dataclass
class KVView:
    """The tokens that the queries of one forward may attend to.

    Args:
        segments: what is stored, and the tokens of this forward.
        seen: logical length, the tokens of this forward included.
        queries: tokens of this forward.
        dtype: the model's dtype.
        evicting: whether the cache drops tokens, so that a mask that is not gathered would be wrong.
        holes: whether some slots may be empty (rows of a batch hold different numbers of tokens).
        watch: shown the weights of attention, None where nobody looks.
        done: called once attention is over, with the query and the mask, to let the layer settle.
    """

    segments: list[Segment]
    seen: int
    queries: int
    dtype: torch.dtype
    evicting: bool = False
    holes: bool = False
    watch: Watch | None = None
    done: Callable[[torch.Tensor | None, torch.Tensor | None], None] = field(default=lambda query, mask: None)

    @property
    def device(self) -> torch.device:
        return next(self.segments[-1].keys.tensors()).device

    @property
    def kv_heads(self) -> int:
        return next(self.segments[-1].keys.tensors()).shape[1]

    def spread(self) -> KVView:
        """The same view without owners: slots that heads share are repeated for each head, empty for all but one."""
        segments = []
        for segment in self.segments:
            if segment.owners is not None:
                keys, values = (
                    Encoded(x.codec, {k: t.expand(-1, self.kv_heads, -1, -1) for k, t in x.fields.items()}, x.dim)
                    for x in (segment.keys, segment.values)
                )
                heads = torch.arange(self.kv_heads, device=self.device)[:, None]
                slots = segment.owners.long().repeat_interleave(segment.tokens // segment.owners.shape[1], dim=1)
                positions = torch.where(slots[:, None] == heads, segment.positions.long(), -1)
                segment = Segment(keys, values, positions=positions)
            segments.append(segment)
        return replace(self, segments=segments)

    @property
    def tokens(self) -> int:
        """Slots in the view."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def in_order(self) -> bool:
        """Whether slot i holds the token of logical position i, so that a mask needs no gathering."""
        if any(segment.positions is not None for segment in self.segments):
            return False
        runs = [run for segment in self.segments for run in segment.runs]
        return all(start == before for (start, _), (_, before) in zip(runs, [(0, 0), *runs], strict=False))

    @property
    def plain(self) -> bool:
        """Whether the view is one run of tokens in the model's dtype: what any attention function takes as it is."""
        only = self.segments[0]
        if only.sharing is not None:
            return False
        codecs = (only.keys.codec, only.values.codec)
        return len(self.segments) == 1 and self.in_order and all(isinstance(codec, Plain) for codec in codecs)

    def positions(self) -> torch.Tensor:
        """Logical position of every slot, `[rows, kv_heads or 1, tokens]`, -1 where there is none."""
        parts = [segment.logical(self.device) for segment in self.segments]
        rows = max(p.shape[0] for p in parts)
        heads = max(p.shape[1] for p in parts)
        return torch.cat([p.expand(rows, heads, -1) for p in parts], dim=-1)

    def keys(self) -> torch.Tensor:
        """All keys, decoded: `[batch, kv_heads, tokens, head_dim]`."""
        return self._decode("keys")

    def values(self) -> torch.Tensor:
        """All values, decoded: `[batch, kv_heads, tokens, head_dim]`."""
        return self._decode("values")

    def in_time(self, side: str) -> torch.Tensor:
        """The "keys" or "values" of a view that keeps all tokens, decoded and in order: `[batch, kv_heads, seen,
        head_dim]`; zero for padding."""
        x = self._decode(side)
        if self.in_order:
            return x
        positions = self.positions()
        index = torch.where(positions < 0, self.seen, positions)[..., None].expand_as(x)
        return x.new_zeros(*x.shape[:2], self.seen + 1, x.shape[-1]).scatter_(2, index, x)[:, :, : self.seen]

    def _decode(self, side: str) -> torch.Tensor:
        parts = []
        for segment in self.segments:
            x = getattr(segment, side).decode(self.dtype)
            parts.append(x if segment.sharing is None else x.index_select(0, segment.sharing.which))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)

    def counted(self, mask: torch.Tensor | None, end: int) -> torch.Tensor | None:
        """Which queries count for the watch, bool `[rows, queries]`; None where there is no mask: then the last ones.

        Args:
            mask: of 2 or 4 dimensions, whose columns for the tokens of this forward end before column `end`. A query
                that does not see itself is padding.
        """
        if mask is None:
            return None
        own = mask[..., end - self.queries : end]
        if mask.ndim == 4:
            own = own[:, 0, 0] if own.shape[2] == 1 else own[:, 0].diagonal(dim1=1, dim2=2)
        real = own > torch.finfo(own.dtype).min / 2 if mask.ndim == 4 and own.is_floating_point() else own.bool()
        if self.watch.queries is None:
            return real
        return real & (real.flip(-1).cumsum(-1).flip(-1) <= self.watch.queries)

    def align(self, mask: torch.Tensor | None, causal: bool = True, part: slice = slice(None)) -> torch.Tensor | None:
        """The logical mask with its columns gathered at the positions of the slots.

        Args:
            mask: None (nothing masked but the future), a padding mask `[batch, seen]`, or a full mask
                `[batch or 1, heads or 1, queries, >= seen]`, boolean or additive.
            causal: whether a query may not see tokens after it, where `mask` does not say.
            part: which of the queries.

        Returns:
            `[batch or 1, heads or 1, queries, tokens]` of the mask's kind, or None when every slot is visible.

        Raises:
            ValueError: the mask has fewer columns than tokens were seen.
        """
        if mask is not None and mask.shape[-1] < self.seen:
            raise ValueError(
                f"attention_mask has {mask.shape[-1]} columns, but the cache has seen {self.seen} tokens: "
                "pass a mask over all of them, those already in the cache included"
            )
        if mask is None or mask.ndim == 2:
            if mask is None and (self.queries == 1 or not causal) and not self.holes:
                return None
            positions = self.positions()
            visible = (positions >= 0)[:, :, None, :]
            if causal and self.queries > 1:
                query = torch.arange(self.seen - self.queries, self.seen, device=positions.device)[part]
                visible = visible & (positions[:, :, None, :] <= query[None, None, :, None])
            if mask is not None:
                rows = mask.bool()[:, None].expand(-1, positions.shape[1], -1)
                index = positions.clamp(min=0).expand(mask.shape[0], -1, -1)
                visible = visible & rows.gather(-1, index)[:, :, None, :]
            return visible
        mask = part_of(mask, part)
        if self.in_order:
            return mask[..., : self.seen]
        positions = self.positions()[:, :, None, :]
        batch = max(mask.shape[0], positions.shape[0])
        heads = max(mask.shape[1], positions.shape[1])
        if mask.shape[1] > 1 and positions.shape[1] > 1:
            positions = positions.repeat_interleave(heads // positions.shape[1], dim=1)
        index = positions.clamp(min=0).expand(batch, heads, mask.shape[2], -1)
        gathered = mask.expand(batch, heads, -1, -1).gather(-1, index)
        if not self.holes:
            return gathered
        if gathered.dtype == torch.bool:
            return gathered & (positions >= 0)
        return gathered.masked_fill(positions < 0, torch.finfo(gathered.dtype).min)


def part_of(mask: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    """The rows of a mask of 4 dimensions for some of the queries; one row is for all of them."""
    return mask if mask is None or mask.shape[2] == 1 else mask[:, :, part]


def mark_plain(x: torch.Tensor) -> torch.Tensor:
    """Marks a plain view of a store's buffer, so that the attention function knows where it comes from."""
    x.kvplug_plain = True
    return x


def with_graph(
    shown: tuple[torch.Tensor, torch.Tensor], states: tuple[torch.Tensor, torch.Tensor], before: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a layer that keeps all tokens shows of a forward, as tensors through which gradients flow to its tokens.

    Args:
        shown: handles or plain tensors, `[batch, kv_heads, before + tokens, head_dim]`.
        states: the keys and values of the forward's tokens; those before them are constants.
    """
    view = view_of(*shown)
    if before:
        past = shown if view is None else (view.in_time("keys"), view.in_time("values"))
        states = tuple(torch.cat([x[:, :, :before], new], dim=2) for x, new in zip(past, states, strict=True))
    elif view is not None:
        states = tuple(x.view_as(x) for x in states)
    if view is not None:
        states[0].kvplug_done = view.done
    return states


def view_of(key: torch.Tensor, value: torch.Tensor) -> KVView | None:
    """The view behind a pair of handles, if the model passed both on untouched, else None."""
    if isinstance(key, KVTensor) and isinstance(value, KVTensor) and key.kv is value.kv:
        return key.kv
    return None


def plain_view(key: torch.Tensor, value: torch.Tensor) -> KVView | None:
    """A view for one query over a pair of marked tensors, if the model passed both on untouched, else None."""
    if not (getattr(key, "kvplug_plain", False) and getattr(value, "kvplug_plain", False)):
        return None
    plain = CODECS["dense"]
    return KVView([Segment(plain.encode(key), plain.encode(value))], key.shape[2], queries=1, dtype=key.dtype)


class KVTensor(torch.Tensor):
    """The handle of a view's keys or values that `update` returns to the model.

    The registered attention function reads the view behind it. Any other operation gets the decoded tensor, once both
    sides were decoded the layer settles. Under a cache that evicts that would pair slots with the wrong columns of the
    mask, so it raises instead.
    """

    kv: KVView
    side: str

    @staticmethod
    def __new__(cls, view: KVView, side: str, pair: list) -> KVTensor:
        newest: Encoded = getattr(view.segments[-1], side)
        sample = next(newest.tensors())
        shape = (view.segments[-1].batch, sample.shape[1], view.seen, newest.dim)
        handle = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=view.dtype, device=sample.device)
        handle.kv, handle.side, handle.pair = view, side, pair
        pair.append(None)
        return handle

    @classmethod
    def of(cls, view: KVView) -> tuple[KVTensor, KVTensor]:
        """The two handles of a view: keys and values."""
        pair: list = []
        return cls(view, "keys", pair), cls(view, "values", pair)

    def decoded(self) -> torch.Tensor:
        """The plain tensor `[batch, kv_heads, seen, head_dim]`.

        Raises:
            ValueError: the cache evicts tokens, so only the attention function registered as "kvplug" can read it.
        """
        if self.kv.evicting:
            raise ValueError(
                "this cache evicts tokens, but the model read its keys or values outside the attention function "
                "'kvplug', where the mask would not match them. Build the cache from the model itself (or from its own "
                "config object, not a copy), or call kvplug.attach(model); where it has latent attention, call "
                "kvplug.absorb(model). A model with its own attention code needs a cache that keeps all tokens "
                "(DenseCache, QuantCache)."
            )
        slot = 0 if self.side == "keys" else 1
        if self.pair[slot] is None:
            # The handle claims contiguous strides, which a first forward's keys need not have.
            self.pair[slot] = self.kv.in_time(self.side).contiguous()
            if all(side is not None for side in self.pair):
                self.kv.done(None, None)
        return self.pair[slot]

    def __repr__(self) -> str:
        return f"KVTensor({self.side}, shape={tuple(self.shape)}, dtype={self.dtype}, slots={self.kv.tokens})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(x):
            return x.decoded() if isinstance(x, KVTensor) else x

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
