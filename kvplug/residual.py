"""A layer that keeps its first and last tokens in the model's dtype and the rest encoded in whole groups.

It only says when: what lies where is the stores' affair. It drops nothing, so it must never be given a policy.
"""

from __future__ import annotations

import torch

from kvplug.codecs import Codec
from kvplug.layer import KVLayer
from kvplug.stores import RaggedStore, ResidualStore, State, Store
from kvplug.view import KVView, Segment


class ResidualLayer(KVLayer):
    """A full-attention layer of a `KVCache` over a `ResidualStore`.

    Args:
        keys, values: codec of each side; the larger granule is a multiple of the other.
        residual: least number of last tokens that stay as they came in.
        sinks: number of first tokens that stay as they came in.
        encoded: where encoded tokens go, as for `ResidualStore`.

    Raises:
        ValueError: the groups of keys and values don't fit each other.
    """

    def __init__(self, keys: Codec, values: Codec, residual: int, sinks: int, encoded: Store | None = None):
        super().__init__(keys, values)
        self.store = ResidualStore(keys, values, residual, sinks, encoded)
        self.direct = False

    def _clear(self) -> None:
        super()._clear()
        # Tokens of an unfinished forward that lie in the store already.
        self._placed = 0

    def __repr__(self) -> str:
        return f"ResidualLayer({self._codecs()}, residual={self.store.residual}, sinks={self.store.sinks})"

    @property
    def settings(self) -> tuple:
        return *self.store.codecs, self.store.residual, self.store.sinks

    def _take(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.fresh is None and self.store.place(keys, values):
            self._placed += keys.shape[2]
        else:
            super()._take(keys, values)

    def _stored(self, before: int) -> list[Segment]:
        return self.store.segments()

    def settle(self, mask: torch.Tensor | None = None, force: bool = False) -> None:
        """Encodes the groups that have left the residual. Does nothing while the past is recorded, unless forced.

        Args:
            mask: the logical mask of the forward, from which padding is told.
        """
        if not self.pending:
            return
        if mask is not None:
            self._note_padding(mask)
        if self.record_past and not force:
            return
        if self._real is not None and not self.holes:
            self._part_rows()
        if self.holes:
            self.store.append(*self.fresh, real=self._flags())
        elif self.fresh is not None:
            self.store.append(*self.fresh)
        else:
            self.store.settle()
        self.fresh, self._placed, self._real = None, 0, None

    @property
    def pending(self) -> int:
        return self._placed + self.unfinished

    @property
    def holes(self) -> bool:
        return isinstance(self.store, RaggedStore)

    def _part_rows(self) -> None:
        """From now on rows hold different numbers of tokens; those of this forward wait aside."""
        if self._placed:
            taken = self.store.take_back(self._placed)
            self.fresh = (
                taken
                if self.fresh is None
                else [torch.cat(pair, dim=2) for pair in zip(taken, self.fresh, strict=True)]
            )
            self._placed = 0
        self.store = RaggedStore.of(self.store)

    def _flags(self) -> torch.Tensor | None:
        """Which of the waiting tokens are real, bool `[batch, tokens]` on the host; None for all."""
        if self._real is None:
            return None
        flags = torch.ones(self.batch, self.unfinished, dtype=torch.bool)
        flags[:, : self._real.shape[1]] = self._real.cpu()
        return flags

    def _contents(self, side: int) -> torch.Tensor | None:
        if not self.is_initialized:
            return None
        self.settle()
        if not self.seen:
            return self.store.dense[side][:, :, :0]
        view: KVView = self._view(1)
        return view.in_time(("keys", "values")[side])

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens (see `check_crop` for what raises).

        As if they had never been where the past is recorded, or for up to `UNDO` tokens of the last forward. Else
        groups that were encoded stay so, and what remains of a cut one goes on from what its codes give back.
        """
        remove = self.check_crop(tokens_to_remove)
        self.seen -= remove
        if self.fresh is not None and remove:
            keep = max(self.unfinished - remove, 0)
            remove -= self.unfinished - keep
            # Copied, so that the tokens that are taken back are not held on to.
            self.fresh = tuple(x[:, :, :keep].clone() for x in self.fresh) if keep else None
        if remove:
            self.store.truncate(self.store.length - remove)
            self._placed = max(self._placed - remove, 0)
        if self._real is not None:
            self._real = self._real[:, : self.pending] if self.pending else None
        self.settle(force=True)

    def state(self) -> State:
        tensors, plain = super().state()
        return tensors, {**plain, "placed": self._placed, "ragged": self.holes}

    def load_state(self, state: State, device: torch.device) -> None:
        plain = state[1]
        if plain["ragged"]:
            self.store = RaggedStore(*self.store.codecs, self.store.residual, self.store.sinks, self.store.encoded)
        super().load_state(state, device)
        self._placed = plain["placed"]

    def reset(self) -> None:
        """As new, for any batch; memory is given back."""
        self.store.encoded.reset()
        self.store = ResidualStore(*self.store.codecs, self.store.residual, self.store.sinks, self.store.encoded)
        super().reset()
