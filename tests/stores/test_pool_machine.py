"""A pool of pages under a long random life of its caches, against plain lists of tokens: what a row holds is what it
was given, no page is lost and none is given to two."""

import copy
import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvplug
from kvplug.policies import Window
from tests import models

LAYERS, HEADS, DIM, PAGE = 2, 2, 16, 4
WINDOW = 9
MOST = 64


def states(rows, start, layer, side):
    """What a layer stores of the tokens of `rows` from number `start` on, told by token, place, layer and side."""
    ids = torch.tensor([row[start:] for row in rows], dtype=torch.float32)
    place = torch.arange(start, start + ids.shape[1])
    x = ids * 1000 + place + 0.25 * layer + 0.5 * side
    return x[:, None, :, None].expand(-1, HEADS, -1, DIM) * torch.tensor([1.0, -1.0])[None, :, None, None]


class Twin:
    """A cache of the pool, and beside it the rows of tokens that it must hold."""

    def __init__(self, cache, rows, window=None):
        self.cache, self.rows, self.window = cache, rows, window

    @property
    def seen(self):
        return len(self.rows[0]) if self.rows else 0


class PoolMachine(RuleBasedStateMachine):
    bound = None

    @initialize()
    def make(self):
        self.model = models.tiny_llama().config
        token = LAYERS * HEADS * DIM * 2 * 4
        most = None if self.bound is None else self.bound * PAGE * token
        self.pool = kvplug.PagePool(self.model, PAGE, max_bytes=most)
        self.twins = []

    def held(self):
        """Pages of the living caches and the known prompts; an error that was seen may keep another cache alive."""
        holders = [layer.store.pages for twin in self.twins for layer in twin.cache.layers] + [self.pool.prefixes]
        return len({(id(h.arena), page) for h in holders for page in h.held_pages()})

    def draw(self, data):
        return data.draw(st.sampled_from(self.twins))

    def feed(self, twin, more):
        """Gives a cache new tokens for each row, and undoes it if the pool is full."""
        rows = [row + new for row, new in zip(twin.rows or [[] for _ in more], more, strict=True)]
        before = [layer.store.length for layer in twin.cache.layers], self.held()
        try:
            for layer in range(LAYERS):
                keys, values = (states(rows, twin.seen, layer, side) for side in (0, 1))
                twin.cache.update(keys, values, layer)
        except kvplug.OutOfPages:
            assert self.bound is not None
            assert layer == 0, "told before anything is changed"
            assert ([layer.store.length for layer in twin.cache.layers], self.held()) <= before
            return
        twin.rows = rows
        for layer in twin.cache.layers:
            layer.settle()

    @precondition(lambda self: len(self.twins) < 5)
    @rule(evicts=st.booleans(), batch=st.integers(1, 3), tokens=st.integers(1, 13), data=st.data())
    def begin(self, evicts, batch, tokens, data):
        policy = Window(WINDOW) if evicts else None
        twin = Twin(kvplug.PagedCache(self.model, pool=self.pool, policy=policy), [], WINDOW if evicts else None)
        self.twins.append(twin)
        self.feed(twin, self.some(data, batch, tokens))

    def some(self, data, batch, tokens):
        # Few different tokens, so that prompts often begin alike.
        seed = data.draw(st.integers(0, 3))
        drawn = torch.randint(1, 3, (batch, tokens), generator=torch.Generator().manual_seed(seed))
        return drawn.tolist()

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), tokens=st.integers(1, 6))
    def append(self, data, tokens):
        twin = self.draw(data)
        if twin.seen + tokens <= MOST:
            self.feed(twin, self.some(data, len(twin.rows) or 1, tokens))

    @precondition(lambda self: self.twins and len(self.twins) < 5)
    @rule(data=st.data())
    def fork(self, data):
        twin = self.draw(data)
        held = self.held()
        self.twins.append(Twin(copy.deepcopy(twin.cache), list(twin.rows), twin.window))
        assert self.held() == held, "a fork copies nothing"

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def crop(self, data):
        twin = self.draw(data)
        if twin.window is not None and twin.seen > twin.window:
            with pytest.raises(ValueError, match="can't be undone"):
                twin.cache.crop(-1)
            return
        count = data.draw(st.integers(0, twin.seen))
        twin.cache.crop(-count)
        twin.rows = [row[: len(row) - count] for row in twin.rows]

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def select(self, data):
        twin = self.draw(data)
        if twin.seen:
            rows = data.draw(st.lists(st.integers(0, len(twin.rows) - 1), min_size=1, max_size=4))
            held = self.held()
            twin.cache.batch_select_indices(torch.tensor(rows))
            twin.rows = [twin.rows[i] for i in rows]
            assert self.held() <= held, "rows that move copy nothing"

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def reorder(self, data):
        twin = self.draw(data)
        if twin.seen:
            order = data.draw(st.lists(st.integers(0, len(twin.rows) - 1), min_size=len(twin.rows)))[: len(twin.rows)]
            twin.cache.reorder_cache(torch.tensor(order))
            twin.rows = [twin.rows[i] for i in order]

    @precondition(lambda self: self.twins)
    @rule(data=st.data(), repeats=st.integers(1, 2))
    def repeat(self, data, repeats):
        twin = self.draw(data)
        if twin.seen and len(twin.rows) * repeats <= 6:
            twin.cache.batch_repeat_interleave(repeats)
            twin.rows = [row for row in twin.rows for _ in range(repeats)]

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def keep(self, data):
        twin = self.draw(data)
        if twin.window is None and twin.seen:
            self.pool.keep(twin.cache, torch.tensor(twin.rows))

    @precondition(lambda self: len(self.twins) < 5)
    @rule(batch=st.integers(1, 2), tokens=st.integers(2, 20), data=st.data())
    def open(self, batch, tokens, data):
        ids = self.some(data, batch, tokens)
        cache = self.pool.open(torch.tensor(ids))
        known = cache.get_seq_length()
        assert known < tokens
        assert known % PAGE == 0
        self.twins.append(Twin(cache, [row[:known] for row in ids] if known else []))

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def reset(self, data):
        twin = self.draw(data)
        twin.cache.reset()
        twin.rows = []

    @precondition(lambda self: self.twins)
    @rule(data=st.data())
    def drop(self, data):
        twin = self.draw(data)
        if self.bound is not None:
            # An error that was seen may keep the cache alive, and then what fits would depend on when it is collected.
            twin.cache.reset()
        self.twins.remove(twin)

    @rule()
    def clear(self):
        self.pool.clear()

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        if self.bound is not None:
            assert self.pool.nbytes <= self.pool.max_bytes

    @invariant()
    def every_row_holds_its_tokens(self):
        for twin in getattr(self, "twins", ()):
            for number, layer in enumerate(twin.cache.layers):
                assert layer.seen == twin.seen
                if not twin.seen:
                    continue
                for side, held in enumerate((layer.keys, layer.values)):
                    wanted = states(twin.rows, 0, number, side)
                    if twin.window is not None:
                        # Slots are reused: the tokens are there in any order.
                        wanted = wanted[:, :, -twin.window :]
                        held, wanted = (x.abs().sort(dim=2).values for x in (held, wanted))
                    assert held.equal(wanted)

    def teardown(self):
        if hasattr(self, "pool"):
            self.twins.clear()
            self.pool.clear()
            if self.pool.pages_held:
                # An error that was seen keeps the cache alive that it was raised in.
                gc.collect()
            self.pool.check()
            assert self.pool.pages_held == 0
            assert self.pool.nbytes == 0


class BoundedPoolMachine(PoolMachine):
    bound = 12


LIFE = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
TestPool.settings = LIFE
TestBoundedPool = BoundedPoolMachine.TestCase
TestBoundedPool.settings = LIFE
