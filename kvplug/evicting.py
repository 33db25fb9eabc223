"""A layer under a policy: what the policy drops is freed once attention over the forward that brought it is done.

Here the policy goes by positions alone; `ScoredLayer` goes by scores.
"""

from __future__ import annotations

import torch

from kvplug.codecs import CODECS
from kvplug.layer import KVLayer
from kvplug.policies import SinkWindow
from kvplug.stores import Want, admit
from kvplug.view import Segment


class EvictingLayer(KVLayer):
    """A full-attention layer that keeps what its policy ranks highest, for a whole row the same tokens in each head."""

    def want(self, rows: int, tokens: int) -> Want:
        """Of a paged store: what it takes to store `tokens` more of each of `rows` rows; any slot may be reused."""
        seen, budget = self.seen + tokens, self._most(self.seen + tokens)
        # Of several tokens some may turn out to be padding, and then any slot may be reused too.
        first = self.store.length if seen <= budget and self.padding is None and tokens == 1 else 0
        return Want(self.store.pages, rows, first, max(min(seen, budget), self.store.length))

    def _most(self, seen: int) -> int:
        """Most slots that may be in use once `seen` tokens were."""
        return self.budget

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """As `KVLayer.update`; a forward before this one that was broken off is over."""
        if self.readers is not None:
            self.readers.end()
        return super().update(key_states, value_states, *args, **kwargs)

    def settle(self, mask: torch.Tensor | None = None, force: bool = False) -> None:
        """As `KVLayer.settle`, but not before all layers that read what is held have attended: slots are reused."""
        if force or self.readers is None or not self.readers.waiting:
            super().settle(mask, force)

    def _change_rows(self, change, batch: int) -> None:
        if self.readers is not None:
            self.readers.end()
        super()._change_rows(change, batch)

    def _stored(self, before: int) -> list[Segment]:
        [whole] = super()._stored(before)
        dropping = isinstance(self.policy, SinkWindow) and self.policy.compact and before > self.budget
        if not dropping or self.rope is None:
            return [whole]
        sinks, length = self.policy.sinks, self.store.length
        keys, values, positions = whole.keys, whole.values, whole.positions
        moved = self.rope.rotate(keys.narrow(0, sinks).decode(self.dtype), self._dropped(before))
        return [
            Segment(CODECS["dense"].encode(moved), values.narrow(0, sinks), positions=positions[..., :sinks]),
            Segment(
                keys.narrow(sinks, length - sinks),
                values.narrow(sinks, length - sinks),
                positions=positions[..., sinks:],
            ),
        ]

    def _dropped(self, before: int) -> int | torch.Tensor:
        """Real tokens that each row has given up: the gap between its sinks and its window."""
        if self.padding is None:
            return before - self.budget
        return (before - self.padding - self.budget).clamp(min=0)

    def _place(self, keys: torch.Tensor, values: torch.Tensor, before: int, real: torch.Tensor | None) -> None:
        """Stores what the policy keeps of new tokens, and of those held."""
        tokens = keys.shape[2]
        if real is None and self.padding is None and before + tokens <= self.budget:
            self.store.append(keys, values, start=before)
            return
        number, positions = self._numbers(keys, before, real)
        self._open(tokens)
        held = self.store.positions.long()
        slot = torch.arange(self.store.length, device=keys.device).expand_as(held)
        admission = admit(
            held,
            self.policy.priority(held, slot),
            positions,
            self.policy.priority(positions, number),
            self.budget,
            newest_stays=tokens == 1 and self.padding is None,
        )
        self.store.put(keys, values, admission)

    def _open(self, tokens: int) -> None:
        """Opens slots for new tokens, as many as the budget lets."""
        slots = min(self.budget, self.store.length + tokens)
        self.store.reserve(slots)
        self.store.length = slots

    def _numbers(self, x: torch.Tensor, before: int, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Of new tokens, `[rows, 1, tokens]`: their number among the real ones of a row, and their position, -1 for
        padding."""
        number = torch.arange(x.shape[2], device=x.device)[None, None]
        positions = number + before
        if real is None and self.padding is None:
            return positions, positions
        return self._count_padding(real, before, number, positions)

    def _count_padding(self, real, before: int, number: torch.Tensor, positions: torch.Tensor):
        """Tells padding from tokens: number of each token among the real ones of its row, and -1 as its position."""
        tokens = number.shape[-1]
        known = self.padding if self.padding is not None else number.new_zeros(1)
        rows = max(known.shape[0], 1 if real is None else real.shape[0])
        flags = torch.ones(rows, tokens, dtype=torch.bool, device=number.device)
        if real is not None:
            flags[:, : real.shape[1]] = real
        number = (before - known)[:, None, None] + flags.long().cumsum(-1)[:, None] - 1
        self.padding = known + (~flags).sum(-1)
        self.store.part(rows)
        return number, torch.where(flags[:, None], positions, -1)
