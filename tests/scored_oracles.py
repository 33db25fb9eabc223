"""The slow reference of layers that score their tokens: every head keeps a list of token numbers, and says why.

`ScoredKeep` fits wherever `tests.oracles.Keep` does. Nothing here calls the package under test; all is in float64.
"""

import copy
import math
from dataclasses import dataclass

import torch

from tests.oracles import Keep, SlowLayer, rotate

# Queries of a forward from which on expected attention takes their statistics anew, and the part of an even share that
# a head has for sure where heads compete.
MANY, SURE = 64, 0.2
# Methods that go by the attention that tokens are paid.
VOTING = ("h2o", "snapkv", "tova")


@dataclass(frozen=True)
class ScoredKeep(Keep):
    """Each key-value head stores the first `sinks`, the last `recent` and the best of the others, up to `budget`.

    `method` names the score; `adaptive` lets the heads of a layer compete after a forward of several tokens.
    """

    budget: int | float = 8
    method: str = "h2o"
    recent: int | None = None
    adaptive: bool = False
    observe: int = 32
    kernel: int = 5
    future: int = 512

    positional = False

    @property
    def evicts(self):
        return True

    @property
    def reads_queries(self):
        return self.method in (*VOTING, "expected")

    @property
    def remembers(self):
        return self.method in ("h2o", "snapkv", "keydiff", "expected")

    def room(self, prompt):
        return max(int(self.budget * prompt), 1) if isinstance(self.budget, float) else self.budget

    def count(self, seen, prompt):
        return min(seen, self.room(prompt))

    def stored(self, seen):
        raise NotImplementedError("which tokens are stored depends on what they hold")

    def protected(self, budget):
        """How many first and last tokens stay whatever they score."""
        own = {"h2o": budget // 2, "snapkv": min(self.observe, budget // 2)}.get(self.method, 1)
        recent = min(max(own if self.recent is None else self.recent, 1), budget)
        return min(self.sinks, budget - recent), recent

    def score_bytes(self, tokens, heads=2, dim=16):
        """Bytes of a row: an fp32 number for each token, and what the policy remembers of each head."""
        memory = {"keydiff": dim, "expected": 2 * dim + 1}.get(self.method, 0)
        return 4 * heads * (memory + (tokens if self.method != "tova" else 0))

    def layer(self, inv_freq=None):
        return SlowHeads(self, inv_freq)


def rounded(score):
    """To 16 significant bits: scores that agree up to rounding must not decide."""
    part, exponent = math.frexp(score)
    return math.ldexp(round(part * 2**16), exponent - 16)


def pooled(scores, kernel):
    """The largest of each token's neighbours in time: `scores` maps numbers of tokens to scores."""
    order, reach = sorted(scores), kernel // 2
    return {
        token: max(scores[other] for other in order[max(place - reach, 0) : place + reach + 1])
        for place, token in enumerate(order)
    }


class SlowHeads(SlowLayer):
    """One row of one layer; `stored` `[kv_heads]` lists of token numbers, `scores` as many dicts from numbers."""

    def __init__(self, keep, inv_freq=None):
        super().__init__(keep, inv_freq)
        self.new = []  # (key, value, query, weights) of forwards that are not settled
        self.budget = None
        self.slots = self.scores = None
        self.anchor = self.remembered = None

    @property
    def pending(self):
        return sum(key.shape[1] for key, *_ in self.new)

    def held(self, head):
        return self.stored[head]

    def attend(self, query, key, value, scale):
        heads, tokens, group = len(key), query.shape[1], len(query) // len(key)
        out, self.weights, self.query = [], [], query
        earlier = [torch.cat([x[i].double() for x in self.new], dim=1) for i in (0, 1)] if self.new else None
        for head in range(heads):
            held = self.stored[head] if self.scores else []
            parts = []
            for side, new in ((self.keys, key), (self.values, value)):
                side = new[head, :0] if side is None else side[head, held]
                more = [] if earlier is None else [earlier[len(parts)][head]]
                parts.append(torch.cat([side.double(), *more, new[head].double()]))
            own = query[head * group : head * group + group].double()
            scores = own @ parts[0].T * scale
            future = torch.ones(tokens, len(parts[0]), dtype=torch.bool).triu(len(parts[0]) - tokens + 1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            self.weights.append(weights.mean(0))  # over the group: [tokens, candidates]
            out.append(weights @ parts[1])
        return torch.cat(out)

    def store(self, key, value):
        self.new.append((key, value, getattr(self, "query", None), getattr(self, "weights", None)))
        self.query = self.weights = None
        if not self.recording:
            self._settle()

    def _settle(self):
        """Settles what came as one forward; attention and queries count where they are those of all of it."""
        if not self.new:
            return
        key, value = (torch.cat([x[i] for x in self.new], dim=1) for i in (0, 1))
        query, weights = self.new[0][2:] if len(self.new) == 1 else (None, None)
        if self.recording or (query is not None and query.shape[1] != key.shape[1]):
            query = weights = None
        self.new = []
        if self.budget is None:
            self.budget = self.keep.room(key.shape[1])
        if self.scores is None:
            self.stored, self.scores = [[] for _ in key], [{} for _ in key]
            self.slots = [self.budget] * len(key)
        if key.shape[1] == 0:
            return
        first, coded = self.seen, (self.keep.keys(key), self.keep.values(value))
        self.keys = coded[0] if self.keys is None else torch.cat([self.keys, coded[0]], dim=1)
        self.values = coded[1] if self.values is None else torch.cat([self.values, coded[1]], dim=1)
        fresh = range(first, self.seen)
        candidates = [[*held, *fresh] for held in self.stored]
        arrived = self._arrived(key.double(), value.double(), query, first)
        scores = [
            {**old, **dict(zip(fresh, new.tolist(), strict=True))}
            for old, new in zip(self.scores, arrived, strict=True)
        ]
        if self.keep.method == "tova" and weights is not None:
            # All query heads of the layer, whose key-value heads hold the same tokens.
            assert not self.keep.adaptive
            weights = [torch.stack(weights).mean(0)] * len(weights)
        if self.keep.method in VOTING and weights is not None:
            for head, order in enumerate(candidates):
                scores[head] = self._voted(scores[head], order, weights[head])
        self._choose(candidates, scores, key.shape[1])

    def _voted(self, scores, order, weights):
        """Scores after a forward whose queries paid `weights` `[queries, candidates]` to the tokens `order`."""
        if self.keep.method == "h2o":
            return {token: scores[token] + float(w) for token, w in zip(order, weights.sum(0), strict=True)}
        if self.keep.method == "tova":
            return dict(zip(order, weights[-1].tolist(), strict=True))
        observe = self.keep.observe
        last = weights[-observe:]
        fade = 1 - len(last) / observe
        paid = last.sum(0) / observe
        return {token: scores[token] * fade + float(w) for token, w in zip(order, paid, strict=True)}

    def _arrived(self, key, value, query, first):
        """Scores `[kv_heads, tokens]` of tokens that came with keys, values and queries of a forward."""
        if self.keep.method == "knorm":
            return -key.norm(dim=-1)
        if self.keep.method == "keydiff":
            # The embedding of a padding token is zero, and so is its key, which has no direction.
            unit = key / key.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            self.anchor = unit.sum(1) if self.anchor is None else self.anchor + unit.sum(1)
            return -torch.einsum(
                "htd,hd->ht", unit, self.anchor / self.anchor.norm(dim=-1, keepdim=True).clamp(min=1e-12)
            )
        if self.keep.method == "expected":
            return self._expected(key, query, first) * value.norm(dim=-1)
        return torch.zeros(key.shape[:2])

    def _expected(self, key, query, first):
        heads, tokens, dim = key.shape
        if query is None or (self.remembered is not None and tokens < MANY):
            if self.remembered is None:
                self.remembered = torch.zeros(heads, dim), torch.zeros(heads, dim), torch.zeros(heads)
            mean, variance, total = self.remembered
            known = torch.einsum("htd,hd->ht", key, mean.double()) / math.sqrt(dim)
            return (known + torch.einsum("htd,hd->ht", key**2, variance.double()) / dim / 2 - total[:, None]).exp()
        counted = [i for i in range(tokens) if first + i >= self.keep.sinks]
        if not counted:
            self.remembered = torch.zeros(heads, dim), torch.zeros(heads, dim), torch.zeros(heads)
            return torch.zeros(heads, tokens)
        group, scores, remembered = len(query) // heads, torch.zeros(heads, tokens, dtype=torch.double), []
        still = torch.stack([rotate(query[:, i], self.inv_freq, -(first + i)) for i in counted], dim=1)
        # A row of `turn` is a channel's unit vector, turned to each of the positions to come.
        ahead = range(first + tokens, first + tokens + self.keep.future)
        turn = torch.stack([rotate(torch.eye(dim), self.inv_freq, position) for position in ahead]).mean(0)
        for head in range(heads):
            means, spreads, totals = [], [], []
            for own in still[head * group : head * group + group]:
                mean = own.mean(0)
                spread = turn.T @ ((own - mean).T @ (own - mean) / len(counted)) @ turn
                mean = mean @ turn
                seen = key[head, counted]
                logits = seen @ mean / math.sqrt(dim) + ((seen @ spread) * seen).sum(-1) / dim / 2
                scores[head, counted] += logits.softmax(-1) / group
                means.append(mean)
                spreads.append(spread.diagonal())
                totals.append(logits.logsumexp(-1))
            centre = torch.stack(means).mean(0)
            within = [s + (m - centre) ** 2 for s, m in zip(spreads, means, strict=True)]
            remembered.append((centre, torch.stack(within).mean(0), torch.stack(totals).mean()))
        self.remembered = tuple(torch.stack(x) for x in zip(*remembered, strict=True))
        return scores

    def _choose(self, candidates, scores, tokens):
        """Keeps in each head, or in all together, what ranks highest."""
        sinks, recent = self.keep.protected(self.budget)
        ranked = []
        for head, order in enumerate(candidates):
            compared = pooled(scores[head], self.keep.kernel) if self.keep.method == "snapkv" else scores[head]
            rank = {t: (t < sinks or t >= self.seen - recent, rounded(compared[t]), t) for t in order}
            ranked.append(sorted(order, key=rank.get, reverse=True))
            ranked[-1] = [(rank[token], token) for token in ranked[-1]]
        if self.keep.adaptive and tokens > 1 and self.seen > self.budget:
            kept = self._shared(ranked)
            self.slots = [len(x) for x in kept]
        else:
            kept = [[token for _, token in order[:room]] for order, room in zip(ranked, self.slots, strict=True)]
        self.stored = [sorted(x) for x in kept]
        self.scores = [{token: own[token] for token in x} for own, x in zip(scores, self.stored, strict=True)]

    def _shared(self, ranked):
        """What stays of all heads' tokens: each head's first few, then the best of all; of equals the first head's."""
        sure = int(SURE * self.budget)
        everyone = [
            (place < sure, rank, -head, token)
            for head, order in enumerate(ranked)
            for place, (rank, token) in enumerate(order)
        ]
        best = sorted(everyone, reverse=True)[: len(ranked) * self.budget]
        return [[token for _, _, own, token in best if own == -head] for head in range(len(ranked))]

    def crop(self, count):
        """The last `count` tokens go, and their scores; what they said of others stays said."""
        while count and self.new:
            key, value, *_ = self.new.pop()
            taken = min(count, key.shape[1])
            count -= taken
            if taken < key.shape[1]:
                self.new.append((key[:, :-taken], value[:, :-taken], None, None))
        self._settle()
        if count:
            assert self.seen <= self.budget, "what was dropped can't come back"
            seen = self.seen - count
            self.keys, self.values = self.keys[:, :seen], self.values[:, :seen]
            self.stored = [[token for token in held if token < seen] for held in self.stored]
            self.scores = [{token: own[token] for token in own if token < seen} for own in self.scores]

    def copy(self):
        twin = copy.copy(self)
        twin.new = list(self.new)
        return twin
