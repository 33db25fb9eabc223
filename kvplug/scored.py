"""A layer whose policy scores its tokens: every key-value head keeps a choice of its own.

It shows the policy the attention of each forward, keeps a score for each slot where the policy's last, and never looks
at how either is made.
"""

from __future__ import annotations

import torch

from kvplug.evicting import EvictingLayer
from kvplug.policies import Scored
from kvplug.policies.scored import Arrival
from kvplug.stores import State, admit
from kvplug.stores.base import copied, part_of, prefixed
from kvplug.view import Watch

# Beyond every position.
FAR = 1 << 40


class ScoredLayer(EvictingLayer):
    """A full-attention layer under a `Scored` policy, each head with a budget of its own and all of them the same.

    Args:
        keys, values: codec of each side; each token is written by itself.
        policy: which tokens stay.
    """

    policy: Scored

    @property
    def tables(self) -> tuple[str, ...]:
        return ("positions", "scores") if self.policy.lasting else ("positions",)

    def _clear(self) -> None:
        super()._clear()
        # Tokens of the prompt's longest row where the budget is a share of it. Where rows have different ones,
        # `[batch, 3]`: each row's budget, and the first and last tokens that stay.
        self._prompt: int | None = None
        self._by_row: torch.Tensor | None = None
        # Position past the sinks of each row, `[batch, 1, 1]`, where rows have different ones.
        self._sinks_end: torch.Tensor | None = None
        # What the policy remembers beside the scores, a row of the batch in each row.
        self.memo: dict[str, torch.Tensor] = {}
        # What was seen of this forward's attention, `[batch, kv_heads, slots]`.
        self._mass: torch.Tensor | None = None
        # The queries of this forward, of each layer that attended to it.
        self._queries: list[torch.Tensor] = []

    @property
    def budget(self) -> int | None:
        """Tokens that a head keeps; None where that is a share of a prompt that was not seen yet."""
        if isinstance(self.policy.budget, int):
            return self.policy.budget
        return None if self._prompt is None else self.policy.tokens(self._prompt)

    def _most(self, seen: int) -> int:
        return self.budget if self.budget is not None else self.policy.tokens(seen)

    # In a forward

    def _watch(self) -> Watch | None:
        self._mass = None
        self._queries.clear()
        if self.policy.watched == 0:
            return None
        return Watch(self.policy.watched, self._see)

    def _done(self, query: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        if query is not None and self.policy.needs_queries:
            self._queries.append(query.detach())
        super()._done(query, mask)

    def _asked(self) -> torch.Tensor | None:
        """The queries of this forward, `[batch, heads, queries, head_dim]`, the heads of several layers by what they
        read."""
        found, self._queries = self._queries, []
        # A model may ask for the last tokens alone from some layer on.
        found = [query for query in found if query.shape[2] == found[0].shape[2]]
        if len(found) < 2:
            return found[0] if found else None
        return torch.cat([query.unflatten(1, (self.shape[1], -1)) for query in found], dim=2).flatten(1, 2)

    def _see(self, weights: torch.Tensor) -> None:
        self._add(self.policy.reduce(weights.detach()))

    def _add(self, mass: torch.Tensor) -> None:
        # What attends to this layer when it has settled is not asked.
        if self.fresh is not None:
            self._mass = mass if self._mass is None else self._mass + mass

    def _place(self, keys: torch.Tensor, values: torch.Tensor, before: int, real: torch.Tensor | None) -> None:
        tokens = keys.shape[2]
        if self.budget is None:
            self._take_share(tokens, real)
        number, positions = self._numbers(keys, before, real)
        flags = None if real is None and self.padding is None else (positions >= 0)[:, 0]
        scores = self._renewed(Arrival(keys, values, number, self.memo, flags, self._asked(), self.rope))
        if flags is None and before + tokens <= self.budget:
            self.store.append(keys, values, start=before)
            if self.policy.lasting:
                self.store.scores.copy_(scores)
            return
        if self.padding is not None:
            self._note_sinks(number, positions, before)
        self._choose(keys, values, scores, number, positions)

    def _take_share(self, tokens: int, real: torch.Tensor | None) -> None:
        """Makes tokens of a budget that is a share of the prompt, which this forward is."""
        if real is None:
            self._prompt = tokens
        else:
            counts = torch.full((real.shape[0],), tokens - real.shape[1]) + real.sum(-1).cpu()
            self._prompt = int(counts.max())
            budgets = [self.policy.tokens(count) for count in counts.tolist()]
            if len(set(budgets)) > 1:
                rows = [(budget, *self.policy.protected(budget)) for budget in budgets]
                self._by_row = torch.tensor(rows, device=self.device)
        self.store.limit = self.budget

    def _renewed(self, new: Arrival) -> torch.Tensor:
        """Scores of the tokens that are held and of the new ones, `[batch, kv_heads, slots + tokens]`."""
        scores = self._joined(self.policy.arrival(new))
        if self._mass is not None:
            most = self.policy.watched
            queries = new.keys.shape[2] if new.real is None else new.real.sum(-1)[:, None, None]
            if most is not None:
                queries = min(queries, most) if new.real is None else queries.clamp(max=most)
            mass = self._mass if self.readers is None else self._mass / self.readers.attending
            scores = self.policy.renew(scores, mass, queries)
            self._mass = None
        return scores

    def _joined(self, new: torch.Tensor) -> torch.Tensor:
        """The scores that are held, then those of new tokens `[batch, kv_heads, tokens]`."""
        held = self.store.scores
        if held is None:
            held = new.new_zeros(*new.shape[:2], self.store.length)
        return torch.cat([held, new], dim=-1)

    def _choose(self, keys, values, scores: torch.Tensor, number: torch.Tensor, positions: torch.Tensor) -> None:
        """Keeps the highest-ranked of the tokens held and the new ones, of which `number` and `positions` tell."""
        tokens, length = keys.shape[2], self.store.length
        self._open(tokens)
        self.store.part(*keys.shape[:2])
        slots = self.store.length
        held = self.store.positions.long()
        at = torch.cat([held[..., :length], positions.expand(*held.shape[:2], -1)], dim=-1)
        first, last = self._protected(at[:, 0])
        rank = self.policy.rank(self.policy.compared(scores, at), at, at < first, at >= last)
        # Slots that were just opened hold nothing.
        opened = held.new_zeros(*held.shape[:2], slots - length)
        admission = admit(
            held,
            torch.cat([rank[..., :length], opened], dim=-1),
            positions,
            rank[..., length:],
            self.budget if self._by_row is None else self._by_row[:, 0],
            newest_stays=tokens == 1 and self.padding is None,
        )
        if self.policy.lasting:
            self.store.scores[..., :length] = scores[..., :length]
        self.store.put(keys, values, admission, scores[..., length:] if self.policy.lasting else None)

    def _note_sinks(self, number: torch.Tensor, positions: torch.Tensor, before: int) -> None:
        """Remembers for each row the position past its first `sinks` real tokens, from those that are new."""
        sinks = self._protected_counts()[0]
        if self._sinks_end is None:
            # All tokens up to now were real.
            start = torch.as_tensor(sinks, device=positions.device)
            self._sinks_end = torch.where(start < before, start, FAR).expand(self.batch, 1, 1).clone()
        beyond = torch.where((positions >= 0) & (number >= sinks), positions, FAR).amin(-1, keepdim=True)
        self._sinks_end = torch.minimum(self._sinks_end, beyond)

    def _protected(self, positions: torch.Tensor) -> tuple:
        """Tokens below the first position and from the second one on stay: numbers, or `[batch, 1, 1]`.

        Args:
            positions: of all tokens that one of the heads may keep, `[batch, candidates]`.
        """
        sinks, recent = self._protected_counts()
        if self.padding is None:
            return sinks, self.seen - recent
        index = torch.as_tensor(recent, device=positions.device).clamp(max=positions.shape[-1]).reshape(-1, 1) - 1
        ordered = positions.sort(dim=-1, descending=True).values
        return self._sinks_end, ordered.gather(-1, index.expand(len(positions), 1))[..., None]

    def _protected_counts(self) -> tuple:
        """First and last tokens that stay: numbers, or one for each row, `[batch, 1, 1]`."""
        if self._by_row is None:
            return self.policy.protected(self.budget)
        return tuple(self._by_row[:, column, None, None] for column in (1, 2))

    # Lengths and changes of the past

    @property
    def policy_state(self) -> list[torch.Tensor]:
        """What the policy keeps beside a score for each slot."""
        return [*self.memo.values(), *(x for x in (self._by_row, self._sinks_end) if x is not None)]

    def activate_past_recording(self) -> None:
        """From now on a forward is settled by `crop` alone, so that its tokens can be taken back.

        Raises:
            ValueError: the policy reads the attention, which can't be taken back.
        """
        if self.policy.needs_queries:
            raise ValueError(
                f"{self.policy} goes by what queries ask for, and what those of cropped tokens asked for can't be "
                "taken back: its cache can't record the past. A policy that does not look at queries, or a cache that "
                "keeps all tokens, is accepted for assisted decoding"
            )
        super().activate_past_recording()

    def _change_rows(self, change, batch: int) -> None:
        super()._change_rows(change, batch)
        self.memo = {name: change(x) for name, x in self.memo.items()}
        for name in ("_by_row", "_sinks_end"):
            if getattr(self, name) is not None:
                setattr(self, name, change(getattr(self, name)))

    def state(self) -> State:
        tensors, plain = super().state()
        found = {"by_row": self._by_row, "sinks_end": self._sinks_end} | prefixed("memo", (self.memo, {}))[0]
        return tensors | {n: x for n, x in found.items() if x is not None}, {
            **plain,
            "prompt": self._prompt,
            "memo": {},
        }

    def load_state(self, state: State, device: torch.device) -> None:
        tensors, plain = state
        self._prompt = plain["prompt"]
        self.store.limit = self.budget
        super().load_state(state, device)
        self._by_row, self._sinks_end = (copied(tensors, name, device) for name in ("by_row", "sinks_end"))
        memo = part_of(state, "memo")[0]
        self.memo = {name: copied(memo, name, device) for name in memo}

    def reset(self) -> None:
        """As new, for any batch; memory is given back."""
        super().reset()
        self.store.limit = self.budget
