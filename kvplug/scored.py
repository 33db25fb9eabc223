"""A layer whose policy scores its tokens: every key-value head keeps a choice of its own.

It shows the policy the attention of each forward, keeps a score for each slot where the policy's last, and never looks
at how either is made.
"""

from __future__ import annotations

import torch

from kvplug.layer import KVLayer
from kvplug.policies import Scored
from kvplug.policies.scored import Arrival
from kvplug.stores import admit
from kvplug.view import Watch


class ScoredLayer(KVLayer):
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
        # What a share of the prompt came to: tokens for the longest row, and for each row, `[batch]`, where they differ.
        self._prompt: int | None = None
        self._budgets: torch.Tensor | None = None
        # What the policy remembers beside the scores, a row of the batch in each row.
        self.memo: dict[str, torch.Tensor] = {}
        # What was seen of this forward's attention, `[batch, kv_heads, slots]`, and from how many queries.
        self._mass: torch.Tensor | None = None
        self._queries = 0
        # The queries of this forward.
        self._query: torch.Tensor | None = None

    @property
    def budget(self) -> int | None:
        """Tokens that a head keeps; None where that is a share of a prompt that was not seen yet."""
        if isinstance(self.policy.budget, int):
            return self.policy.budget
        return None if self._prompt is None else self.policy.tokens(self._prompt)

    # In a forward

    def _watch(self) -> Watch | None:
        if not self.policy.needs_queries:
            return None
        self._mass, self._queries = None, 0
        return Watch(self.policy.watched, self._see)

    def _done(self, query: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        self._query = query
        self.settle(mask)
        self._query = None

    def _see(self, weights: torch.Tensor) -> None:
        mass = self.policy.reduce(weights)
        self._mass = mass if self._mass is None else self._mass + mass
        self._queries += weights.shape[3]

    def _place(self, keys: torch.Tensor, values: torch.Tensor, before: int, real: torch.Tensor | None) -> None:
        tokens = keys.shape[2]
        if self.budget is None:
            self._take_share(tokens, real)
        number, positions = self._numbers(keys, before, real)
        query, self._query = self._query, None
        flags = None if real is None and self.padding is None else (positions >= 0)[:, 0]
        scores = self._renewed(Arrival(keys, values, number, self.memo, flags, query, self.rope))
        if flags is None and before + tokens <= self.budget:
            self.store.append(keys, values, start=before)
            if self.policy.lasting:
                self.store.scores.copy_(scores)
            return
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
                self._budgets = torch.tensor(budgets, device=self.device)
        self.store.limit = self.budget

    def _renewed(self, new: Arrival) -> torch.Tensor:
        """Scores of the tokens that are held and of the new ones, `[batch, kv_heads, slots + tokens]`."""
        scores = self.policy.arrival(new)
        held = self.store.scores
        if held is None:
            held = scores.new_zeros(*scores.shape[:2], self.store.length)
        scores = torch.cat([held, scores], dim=-1)
        if self._mass is not None:
            scores = self.policy.renew(scores, self._mass, self._queries)
            self._mass = None
        return scores

    def _choose(self, keys, values, scores: torch.Tensor, number: torch.Tensor, positions: torch.Tensor) -> None:
        """Keeps the highest-ranked of the tokens held and the new ones, of which `number` and `positions` tell."""
        tokens, length = keys.shape[2], self.store.length
        self._open(tokens)
        self.store.part(*keys.shape[:2])
        slots = self.store.length
        held = self.store.positions.long()
        at = torch.cat([held[..., :length], positions.expand(*held.shape[:2], -1)], dim=-1)
        rank = self._ranked(scores, at, number)
        # Slots that were just opened hold nothing.
        opened = held.new_zeros(*held.shape[:2], slots - length)
        admission = admit(
            held,
            torch.cat([rank[..., :length], opened], dim=-1),
            positions,
            rank[..., length:],
            self.budget if self._budgets is None else self._budgets,
            newest_stays=tokens == 1 and self.padding is None,
        )
        if self.policy.lasting:
            self.store.scores[..., :length] = scores[..., :length]
        self.store.put(keys, values, admission, scores[..., length:] if self.policy.lasting else None)

    def _ranked(self, scores: torch.Tensor, positions: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        """Ranks of the tokens at `positions`, the last of which are new and have `number` among those of their row."""
        tokens = number.shape[-1]
        slot = torch.arange(positions.shape[-1] - tokens, device=positions.device).expand(*number.shape[:2], -1)
        index = torch.cat([slot, number], dim=-1)
        sinks, recent = self._protected()
        if self.padding is None:
            last = positions >= self.seen - recent
        else:
            last = positions >= self._recent_from(positions, recent)
        return self.policy.rank(self.policy.compared(scores, positions), positions, index < sinks, last)

    def _protected(self) -> tuple:
        """First and last tokens that stay: numbers, or one for each row, `[batch, 1, 1]`."""
        if self._budgets is None:
            return self.policy.protected(self.budget)
        pairs = [self.policy.protected(budget) for budget in self._budgets.tolist()]
        return tuple(torch.tensor(side, device=self.device)[:, None, None] for side in zip(*pairs, strict=True))

    def _recent_from(self, positions: torch.Tensor, recent: int | torch.Tensor) -> torch.Tensor:
        """Position of the first of a row's `recent` last tokens, `[rows, heads, 1]`; -1 where there are fewer."""
        index = torch.as_tensor(recent, device=positions.device).clamp(max=positions.shape[-1]) - 1
        ordered = positions.sort(dim=-1, descending=True).values
        return ordered.gather(-1, index.expand(*positions.shape[:2], 1))

    # Lengths and changes of the past

    @property
    def policy_state(self) -> list[torch.Tensor]:
        """What the policy keeps beside a score for each slot."""
        return [*self.memo.values(), *([] if self._budgets is None else [self._budgets])]

    def activate_past_recording(self) -> None:
        """From now on a forward is settled by `crop` alone, so that its tokens can be taken back.

        Raises:
            ValueError: the policy reads the attention, which can't be taken back.
        """
        if self.policy.needs_queries:
            raise ValueError(
                f"{self.policy} counts the attention that tokens draw, and that of tokens which are cropped can't be "
                "taken back: its cache can't record the past. A policy that does not look at attention, or a cache "
                "that keeps all tokens, is accepted for assisted decoding"
            )
        super().activate_past_recording()

    def _change_rows(self, change, batch: int) -> None:
        super()._change_rows(change, batch)
        self.memo = {name: change(x) for name, x in self.memo.items()}
        if self._budgets is not None:
            self._budgets = change(self._budgets)

    def reset(self) -> None:
        """As new, for any batch; memory is given back."""
        super().reset()
        self.store.limit = self.budget
