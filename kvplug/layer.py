"""One layer of a cache: a store and a policy, and every method that transformers calls on a cache layer.

A forward appends or shows its tokens, attention reads the view, and then the layer settles: what the policy drops is
freed and what stays is encoded. Nothing here looks at scores or at bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from transformers.cache_utils import CacheLayerMixin

from kvplug.codecs import CODECS, Codec, Plain
from kvplug.padding import nothing_hidden, visible_since
from kvplug.policies import Policy
from kvplug.rope import Rope
from kvplug.sharing import Readers
from kvplug.stores import STORES, State, Store, Want, check_finite, check_shapes
from kvplug.stores.base import copied, dtype_named, part_of, prefixed
from kvplug.view import KVTensor, KVView, Segment, Watch, mark_plain, with_graph

# Tensors of a layer's state, beside those of its store: see `KVLayer._clear`.
SAVED = ("real", "padding", "fresh.keys", "fresh.values")


def _whole(number: object) -> int | None:
    """An int from an int or an integer tensor of one element, else None."""
    try:
        return operator.index(number)
    except TypeError:
        return None


class KVLayer(CacheLayerMixin):
    """A full-attention layer of a `KVCache`.

    Args:
        keys, values: codec of each side.
        policy: which tokens stay, None for all.
        rope: the model's rotation, needed where the policy moves positions.
        store: makes the store, given what `ContiguousStore` takes.
    """

    is_compileable = False
    is_sliding = False
    # What is told of each slot under a policy.
    tables: tuple[str, ...] = ("positions",)
    # The layers that read what this one holds, None where there are none.
    readers: Readers | None = None

    def __init__(
        self,
        keys: Codec = CODECS["dense"],
        values: Codec = CODECS["dense"],
        policy: Policy | None = None,
        rope: Rope | None = None,
        store: Callable[..., Store] = STORES["contiguous"],
    ):
        # Not the base's __init__: `keys` and `values` are read from the store here.
        self.policy, self.rope = policy, rope
        self._clear()
        self.store = self._empty_store(keys, values, store)
        self.exact = isinstance(keys, Plain) and isinstance(values, Plain)
        self.direct, self.record_past = policy is None and self.exact, False

    def _empty_store(self, keys: Codec, values: Codec, store: Callable[..., Store] = STORES["contiguous"]) -> Store:
        tables = () if self.policy is None else self.tables
        return store(keys, values, limit=self.budget, tables=tables)

    def _clear(self) -> None:
        if self.readers is not None:
            self.readers.end()
        self.is_initialized = False
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None
        self.shape: tuple[int, int, int, int] | None = None
        self.seen = 0
        # Keys and values of the last forward, until attention over them is done.
        self.fresh: tuple[torch.Tensor, torch.Tensor] | None = None
        # Which tokens of `fresh` are real, bool `[rows, tokens]`, where a mask told; the rest are.
        self._real: torch.Tensor | None = None
        # Padding tokens seen by each row, `[rows]`, once a mask was seen.
        self.padding: torch.Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether tokens are given up, so that a mask has to be gathered."""
        return self.policy is not None

    @property
    def budget(self) -> int | None:
        """Most tokens of a row that are kept, None for all."""
        return self.policy.budget if self.policy is not None else None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._codecs()}{f', {self.policy}' if self.policy else ''})"

    def _codecs(self) -> str:
        keys, values = self.store.keys.codec.name, self.store.values.codec.name
        return keys if keys == values else f"keys={keys}, values={values}"

    @property
    def settings(self) -> tuple:
        """What the layer was made with: layers of equal settings hold equal numbers of bytes."""
        return self.policy, self.store.keys.codec, self.store.values.codec

    # What transformers calls in a forward

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.store.allocate(key_states, value_states)
        shape = (*key_states.shape[:2], key_states.shape[-1], value_states.shape[-1])
        self.adopt(shape, key_states.dtype, key_states.device, self.seen)

    def adopt(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, seen: int) -> None:
        """Goes on from `seen` tokens that the store holds already; `shape` is batch, kv_heads, key and value width."""
        self.shape, self.dtype, self.device, self.seen, self.is_initialized = shape, dtype, device, seen, True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Takes the keys and values of a forward and returns what its queries attend to.

        Args:
            key_states, value_states: `[batch, kv_heads, tokens, head_dim]`; widths may differ.

        Returns:
            Handles of the view, or plain tensors where what is stored is what attention wants. They count as read
            once attention or the next update is over.

        Raises:
            ValueError: the shapes differ from those in the cache, or a number that is to be encoded is not finite (told
                on a CPU); the cache stays as it was.
        """
        self.check(key_states, value_states)
        self.settle()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.store_device != self.device:
            self.prefetch()
        before, tokens = self.seen, key_states.shape[2]
        self.seen += tokens
        states = key_states.to(self.dtype), value_states.to(self.dtype)
        shown = self._show(*states, before)
        if torch.is_grad_enabled() and any(x.requires_grad for x in states) and not self.drops:
            shown = with_graph(shown, states, before)
        return shown if self.readers is None else self.readers.show(shown, tokens)

    def _show(self, keys: torch.Tensor, values: torch.Tensor, before: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the tokens of a forward, the first of which is number `before`; what attention over them reads."""
        if self.direct:
            self.store.append(keys.detach(), values.detach())
            if before == 0:
                return keys, values
            parts = self.store.parts()
            if len(parts) == 1 and parts[0].sharing is None:
                return tuple(mark_plain(side.fields["codes"]) for side in (parts[0].keys, parts[0].values))
        else:
            self._take(*(x if self.drops else x.detach() for x in (keys, values)))
        return KVTensor.of(self._view(keys.shape[2]))

    def _take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keeps the tokens of a forward at hand until attention over them is done."""
        if self.fresh is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self.fresh, (keys, values), strict=True))
        self.fresh = keys, values

    def check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Raises ValueError, as `update` does, where it would."""
        check_shapes(key_states, value_states, self.shape)
        if not self.exact:
            check_finite(key_states, value_states)

    def _view(self, queries: int) -> KVView:
        before = self.seen - self.unfinished
        segments = self._stored(before) if self.store.length else []
        if self.fresh is not None:
            keys, values = (CODECS["dense"].encode(x) for x in self.fresh)
            segments.append(Segment(keys, values, start=before))
        return KVView(
            segments,
            seen=self.seen,
            queries=queries,
            dtype=self.dtype,
            evicting=self.drops,
            holes=self.holes,
            watch=self._watch(),
            done=self._done,
        )

    def want(self, rows: int, tokens: int) -> Want:
        """Of a paged store: what it takes to store `tokens` more of each of `rows` rows."""
        return Want(self.store.pages, rows, self.store.length, self.seen + tokens)

    def _watch(self) -> Watch | None:
        """Who wants to see the attention of the forward."""
        return None

    def _stored(self, before: int) -> list[Segment]:
        """Segments of what is stored, when `before` tokens have been seen."""
        length = self.store.length
        positions = self.store.positions
        if positions is not None and self.padding is None and before == length:
            positions = None  # nothing was dropped: slot i holds token i
        return [
            Segment(
                part.keys,
                part.values,
                start=part.start,
                positions=None if positions is None else positions[..., part.start : part.start + part.keys.tokens],
                sharing=part.sharing,
            )
            for part in self.store.parts()
        ]

    # After attention

    def _done(self, query: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        if self.readers is None or self.readers.attended():
            self.settle(mask)

    @property
    def unfinished(self) -> int:
        """Tokens in `fresh`."""
        return self.fresh[0].shape[2] if self.fresh is not None else 0

    @property
    def pending(self) -> int:
        """Tokens of an unfinished forward, or of all that were recorded."""
        return self.unfinished

    @property
    def holes(self) -> bool:
        """Whether rows may hold different numbers of tokens."""
        return self.padding is not None

    def settle(self, mask: torch.Tensor | None = None, force: bool = False) -> None:
        """Lets the policy choose, and encodes what stays. Does nothing while the past is recorded, unless forced.

        Args:
            mask: the logical mask of the forward, from which padding is told.
        """
        if self.fresh is None:
            return
        if mask is not None and self.policy is not None:
            self._note_padding(mask)
        if self.record_past and self.policy is not None and not force:
            return
        # What is stored is a constant: gradients flow to the tokens of a forward alone.
        (keys, values), real = (x.detach() for x in self.fresh), self._real
        self.fresh = self._real = None
        self._place(keys, values, self.seen - keys.shape[2], real)

    def _place(self, keys: torch.Tensor, values: torch.Tensor, before: int, real: torch.Tensor | None) -> None:
        """Stores new tokens, the first of which is number `before`; `real` is False for padding, where a mask told."""
        self.store.append(keys, values)

    def _note_padding(self, mask: torch.Tensor) -> None:
        """Tells from a mask which of the pending tokens are padding: those that no query of the forward sees."""
        start = self.seen - self.pending
        if self.padding is not None or self._real is not None or not nothing_hidden(mask, start, self.seen):
            self._real = visible_since(self._real, mask, start, self.seen)

    # Lengths

    def get_seq_length(self) -> int:
        """Tokens seen, whatever is kept of them."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The full logical mask: attention gathers the columns of what is kept."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number of tokens can be seen."""
        return -1

    @property
    def kept(self) -> int:
        """Slots in use, the tokens of an unfinished forward included."""
        return self.store.length + self.unfinished

    @property
    def batch(self) -> int:
        return self.shape[0] if self.shape else 0

    @property
    def policy_state(self) -> list[torch.Tensor]:
        """What the policy keeps beside a score for each slot."""
        return []

    # Contents

    @property
    def keys(self) -> torch.Tensor | None:
        """Stored keys, decoded, `[batch, kv_heads, kept, head_dim]`; None before the first update."""
        return self._contents(0)

    @property
    def values(self) -> torch.Tensor | None:
        """Stored values, decoded, `[batch, kv_heads, kept, head_dim]`; None before the first update."""
        return self._contents(1)

    def _contents(self, side: int) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        self.settle()
        decoded = self.store.view(0, self.store.length)[side].decode(self.dtype)
        return decoded if self.fresh is None else torch.cat([decoded, self.fresh[side]], dim=2)

    # Changes of the past

    @property
    def is_croppable(self) -> bool:
        """False under a policy: what was dropped for the tokens to be removed can't be brought back."""
        return self.policy is None

    def activate_past_recording(self) -> None:
        """From now on a forward is settled by `crop` alone, so that its tokens can be taken back."""
        self.record_past = True

    def check_crop(self, tokens_to_remove: int) -> int:
        """The number of tokens that `crop` would remove.

        Raises:
            ValueError: it is not a number up to 0, is more than were seen, or reaches behind an eviction.
        """
        count = _whole(tokens_to_remove)
        if count is None or count > 0:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove!r} is not valid: minus the number of tokens to remove is accepted"
            )
        remove = -count
        if remove > self.seen:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} removes more than the {self.seen} tokens seen; "
                f"{-self.seen} to 0 is accepted"
            )
        fresh = self.unfinished if self.record_past else 0
        if remove > fresh and self.policy is not None and self.seen - fresh > self.budget:
            raise ValueError(
                f"tokens_to_remove={tokens_to_remove} can't be undone: {self.policy} has dropped tokens since. "
                f"{-fresh} to 0 is accepted; call activate_past_recording() before a forward to be able to crop it"
            )
        return remove

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens as if they had never been (see `check_crop`)."""
        remove = self.check_crop(tokens_to_remove)
        if self.fresh is not None and self.record_past and self.policy is not None:
            tokens, keep = self.unfinished, max(self.unfinished - remove, 0)
            self.seen -= tokens - keep
            remove -= tokens - keep
            # Copied, so that the tokens that are taken back are not held on to.
            self.fresh = tuple(x[:, :, :keep].clone() for x in self.fresh) if keep else None
            self._real = self._real[:, :keep] if self._real is not None and keep else None
        self.settle(force=True)
        if remove == 0:
            return
        self.seen -= remove
        if self.padding is None:
            self.store.truncate(self.store.length - remove)
        else:
            real = (self.store.positions >= self.seen).sum(-1)[:, 0]
            self.padding = self.padding - (remove - real)
            self.store.drop_from(self.seen)

    def reset(self) -> None:
        """As new, for any batch; memory is given back."""
        self.store.reset()
        self.record_past = False
        self._clear()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Rows of the batch in the order `beam_idx`."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices` (numbers or a boolean mask)."""
        if not self.is_initialized:
            return
        indices = torch.as_tensor(indices, device=self.device)
        indices = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices.long()
        self._change_rows(lambda x: x.index_select(0, indices.to(x.device)), len(indices))
        self.store.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, one after the other."""
        if not self.is_initialized:
            return
        self._change_rows(lambda x: x.repeat_interleave(repeats, dim=0), self.batch * repeats)
        self.store.repeat(repeats)

    def _change_rows(self, change, batch: int) -> None:
        self.settle()
        if self.fresh is not None:
            self.fresh = tuple(change(x) for x in self.fresh)
        if self._real is not None and self._real.shape[0] > 1:
            self._real = change(self._real)
        if self.padding is not None and self.padding.shape[0] > 1:
            self.padding = change(self.padding)
        self.shape = (batch, *self.shape[1:])

    # What a file holds

    def state(self) -> State:
        """What is held and remembered, all but what the layer was made with. Views: nothing is copied."""
        self.settle()
        dtype = None if self.dtype is None else str(self.dtype).removeprefix("torch.")
        plain = {"seen": self.seen, "recording": self.record_past, "dtype": dtype, "shape": self.shape}
        if not self.is_initialized:
            return {}, plain
        tensors, store = prefixed("store", self.store.state())
        found = zip(SAVED, (self._real, self.padding, *(self.fresh or (None, None))), strict=True)
        return tensors | {name: x for name, x in found if x is not None}, plain | store

    def load_state(self, state: State, device: torch.device) -> None:
        """Goes on, in a new layer that was made alike, from a copy of what `state` gave, on `device`.

        Raises:
            ValueError: a tensor does not fit.
        """
        tensors, plain = state
        self.seen, self.record_past = plain["seen"], plain["recording"]
        if plain["shape"] is None:
            return
        self.dtype, self.device, self.shape = dtype_named(plain["dtype"]), device, tuple(plain["shape"])
        batch, heads, *widths = self.shape
        like = [torch.empty(batch, heads, 0, width, dtype=self.dtype, device=device) for width in widths]
        self.store.load_state(part_of(state, "store"), *like)
        self.is_initialized = True
        self._real, self.padding, *fresh = (copied(tensors, name, device) for name in SAVED)
        self.fresh = tuple(fresh) if fresh[0] is not None else None

    # Devices

    @property
    def store_device(self) -> torch.device:
        return next(self.store.tensors()).device

    def offload(self) -> None:
        """Moves what is stored to the host."""
        if self.is_initialized:
            self.settle()
            self.store.to("cpu")

    def prefetch(self) -> None:
        """Moves what is stored back to the layer's device."""
        if self.is_initialized:
            self.store.to(self.device)
