"""Slots that heads share against lists of tokens: who owns which page, what lies where, and where a new token goes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.codecs import CODECS
from kvplug.stores import ContiguousStore
from kvplug.stores.heads import NOBODY, HeadStore, Shares, page_of

HEADS, DIM = 3, 8


def ranks(draw, rows, candidates):
    """`[rows, HEADS, candidates]`, all distinct in a head."""
    drawn = [draw.sample(range(1000), candidates) for _ in range(rows * HEADS)]
    return torch.tensor(drawn).view(rows, HEADS, candidates)


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 9), st.sampled_from([1, 2, 4]))
def test_shares_give_each_head_whole_pages_and_its_tokens_in_order_of_rank(draw, rows, candidates, page):
    rank = ranks(draw, rows, candidates)
    kept = torch.tensor([[[draw.random() < 0.6 for _ in range(candidates)] for _ in range(HEADS)] for _ in range(rows)])
    room = torch.tensor([[draw.randrange(3) for _ in range(HEADS)] for _ in range(rows)])
    slots = kept.sum(-1) + room
    pages = max(int((-(-slots // page)).sum(-1).max()), 1) + draw.randrange(2)
    shares = Shares.of(rank, kept, slots, page, pages)
    assert shares.source.shape == (rows, pages * page)
    assert shares.owners.shape == (rows, pages)
    for row in range(rows):
        owned = [-(-int(n) // page) for n in slots[row]]
        owners = [head for head in range(HEADS) for _ in range(owned[head])]
        assert shares.owners[row].tolist() == owners + [HEADS] * (pages - len(owners))
        expected = []
        for head in range(HEADS):
            order = sorted(range(candidates), key=lambda c: -int(rank[row, head, c]))
            mine = [head * candidates + c for c in order if kept[row, head, c]]
            mine += [-1] * (int(slots[row, head]) - len(mine))
            expected += mine + [NOBODY] * (owned[head] * page - len(mine))
        expected += [NOBODY] * (pages * page - len(expected))
        assert shares.source[row].tolist() == expected


@pytest.mark.parametrize("budget", [1, 7, 8, 31, 32, 63, 64, 300, 511, 512, 4096])
def test_pages_are_powers_of_two_of_at_most_a_32nd_of_an_even_share(budget):
    page = page_of(budget)
    assert page & (page - 1) == 0
    assert 1 <= page <= 16
    assert page == 1 or page * 32 <= budget
    assert page == 16 or 2 * page * 32 > budget


def tokens(rows, count, seed):
    return torch.randn(rows, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))


class Lists:
    """What each row and head holds: position -> (key, value, score)."""

    def __init__(self, rows):
        self.held = [[{} for _ in range(HEADS)] for _ in range(rows)]
        self.slots = [[0] * HEADS for _ in range(rows)]


def in_store(store):
    """The same, read from a `HeadStore`; every slot is looked at."""
    rows, keys = store.owners.shape[0], store.view(0, store.length)[0].decode(torch.float32)
    values = store.view(0, store.length)[1].decode(torch.float32)
    found = [[{} for _ in range(HEADS)] for _ in range(rows)]
    for row in range(rows):
        for slot in range(store.length):
            owner, position = int(store.slot_owners[row, slot]), int(store.positions[row, 0, slot])
            if position >= 0:
                assert owner < HEADS, "a token in a slot that is nobody's"
                assert position not in found[row][owner], "a token twice"
                score = float(store.scores[row, 0, slot])
                found[row][owner][position] = (keys[row, 0, slot].tolist(), values[row, 0, slot].tolist(), score)
    return found


def room(store):
    """Slots of each row and head, empty ones too."""
    there = store.positions[:, 0] != NOBODY
    return [
        [int((there[row] & (store.slot_owners[row] == head)).sum()) for head in range(HEADS)]
        for row in range(len(there))
    ]


def once(codec, x):
    codec = CODECS[codec].tokenwise()
    return codec.decode(codec.encode(x), x.dtype)


def share(store, lists, keys, values, codec, start, choice, page):
    """Makes a store anew in which row r and head h keep the candidates `choice[r][h]`, by position, the first first."""
    rows, _, count, _ = keys.shape
    coded, score = (once(codec, keys), once(codec, values)), torch.rand(rows, HEADS, count)
    if isinstance(store, HeadStore):
        held = store.positions.long().expand(-1, HEADS, -1)
        held = torch.where(store.slot_owners[:, None] == torch.arange(HEADS)[:, None], held, -1)
        old = store.scores.expand(-1, HEADS, -1)
    else:
        held, old = store.positions.long().expand(rows, HEADS, -1), store.scores
    at = torch.cat([held, torch.arange(start, start + count).expand(rows, HEADS, -1)], dim=-1)
    told = {"positions": at, "scores": torch.cat([old, score], dim=-1)}
    for row in range(rows):
        for head in range(HEADS):
            for i in range(count):
                item = coded[0][row, head, i].tolist(), coded[1][row, head, i].tolist(), float(score[row, head, i])
                lists.held[row][head][start + i] = item
    wanted = choice(lists.held)
    kept, rank = torch.zeros(at.shape, dtype=torch.bool), torch.full(at.shape, -1)
    slots = torch.tensor([[max(len(one), 1) for one in row] for row in wanted])
    for row in range(rows):
        for head in range(HEADS):
            for place, position in enumerate(wanted[row][head]):
                where = at[row, head].tolist().index(position)
                kept[row, head, where], rank[row, head, where] = True, 1000 - place
            lists.held[row][head] = {p: lists.held[row][head][p] for p in wanted[row][head]}
    lists.slots = slots.tolist()
    pages = int((-(-slots // page)).sum(-1).max()) + 1
    return HeadStore.of(store, keys, values, told, Shares.of(rank, kept, slots, page, pages))


@pytest.mark.parametrize("page", [1, 2, 4])
@pytest.mark.parametrize("codec", ["dense", "int8", "int4"])
@settings(max_examples=12, deadline=None)
@given(draw=st.randoms(use_true_random=False))
def test_what_heads_hold_through_shares_single_tokens_and_rows(codec, page, draw):
    rows = draw.randrange(1, 4)
    each = CODECS[codec].tokenwise()
    store = ContiguousStore(each, each, tables=("positions", "scores"))
    store.allocate(tokens(rows, 0, 0), tokens(rows, 0, 0))
    lists, first = Lists(rows), draw.randrange(5)
    keys, values = tokens(rows, first, 1), tokens(rows, first, 2)
    if first:
        store.append(keys, values)
        coded = once(codec, keys), once(codec, values)
        for row in range(rows):
            for head in range(HEADS):
                lists.held[row][head] = {
                    i: (coded[0][row, head, i].tolist(), coded[1][row, head, i].tolist(), 0.0) for i in range(first)
                }

    def choice(held):
        return [[draw.sample(sorted(one), draw.randrange(1, len(one) + 1)) for one in row] for row in held]

    start = first
    for turn in range(3):
        new = draw.randrange(1, 5)
        pair = tokens(rows, new, 10 * turn + 3), tokens(rows, new, 10 * turn + 4)
        store = share(store, lists, *pair, codec, start, choice, page)
        start += new
        assert in_store(store) == lists.held
        assert room(store) == lists.slots
        for step in range(2):
            one = tokens(rows, 1, 10 * turn + 5 + step), tokens(rows, 1, 10 * turn + 7 + step)
            coded, score = [once(codec, x) for x in one], torch.rand(rows, 1, HEADS)
            rank = torch.tensor([draw.sample(range(1000), store.length) for _ in range(rows)])
            real = torch.tensor([draw.random() < 0.8 for _ in range(rows)])
            slots = store.free(rank)
            for row in range(rows):
                for head in range(HEADS):
                    mine = [s for s in range(store.length) if int(store.slot_owners[row, s]) == head]
                    mine = [s for s in mine if int(store.positions[row, 0, s]) != NOBODY]
                    empty = [s for s in mine if int(store.positions[row, 0, s]) == -1]
                    slot = int(slots[row, head])
                    assert slot in empty if empty else slot == min(mine, key=lambda s: int(rank[row, s]))
                    if real[row]:
                        lists.held[row][head].pop(int(store.positions[row, 0, slot]), None)
                        item = coded[0][row, head, 0].tolist(), coded[1][row, head, 0].tolist()
                        lists.held[row][head][start] = (*item, float(score[row, 0, head]))
            position = torch.full((rows, 1, HEADS), start)
            store.put_one(*one, slots, position, real, score)
            start += 1
            assert in_store(store) == lists.held
            assert room(store) == lists.slots
        order = [draw.randrange(rows) for _ in range(rows)]
        store.select(torch.tensor(order))
        lists.held = [[dict(one) for one in lists.held[row]] for row in order]
        lists.slots = [list(lists.slots[row]) for row in order]
        assert in_store(store) == lists.held
    held = store.held()
    assert held.spare == 0
    total = sum(x.numel() * x.itemsize for x in store.tensors())
    assert total == held.keys + held.values + held.scales + held.tables + held.scores
    assert store.by_head(0, torch.float32).shape[2] == max(len(one) for row in lists.held for one in row)
