"""Which tokens stay: the window and the sinks against brute force, with padding anywhere and any feeding.

`Table` carries out what an admission says, on positions alone, as a store would.
"""

import random

import pytest
import torch

from kvplug.policies import SinkWindow, Window
from kvplug.stores import admit
from tests.oracles import Keep

BUDGETS = {
    "window_1": (Window(1), Keep(0, 1)),
    "window_8": (Window(8), Keep(0, 8)),
    "sinks_2_window_6": (SinkWindow(2, 6), Keep(2, 6)),
    "sinks_0_window_5": (SinkWindow(0, 5), Keep(0, 5)),
    "sinks_5_window_1": (SinkWindow(5, 1), Keep(5, 1)),
    "original_positions": (SinkWindow(3, 4, positions="original"), Keep(3, 4)),
}


def choose(policy, held, positions, index, **options):
    """The admission that follows from a policy's ranks."""
    slot = torch.arange(held.shape[-1]).expand_as(held)
    ranks = policy.priority(held, slot), policy.priority(positions, index)
    return admit(held, ranks[0], positions, ranks[1], policy.budget, **options)


class Table:
    """Slots of several rows: which position each holds, and how many real tokens each row has seen."""

    def __init__(self, policy, rows):
        self.policy, self.held = policy, torch.full((rows, 1, 0), -1)
        self.columns, self.real = 0, torch.zeros(rows, dtype=torch.long)

    def feed(self, real):
        """`real` `[rows, tokens]`: which of the new tokens are no padding."""
        rows, tokens = real.shape
        slots = min(self.policy.budget, self.held.shape[-1] + tokens)
        empty = torch.full((rows, 1, slots - self.held.shape[-1]), -1)
        self.held = torch.cat([self.held, empty], -1)
        columns = torch.arange(self.columns, self.columns + tokens)
        positions = torch.where(real, columns, -1)[:, None]
        index = (self.real[:, None] + real.long().cumsum(-1) - 1)[:, None]
        admission = choose(self.policy, self.held, positions, index)
        for row in range(rows):
            taken = set()
            for move in range(admission.slots.shape[-1]):
                if not admission.valid[row, 0, move]:
                    continue
                slot, source = int(admission.slots[row, 0, move]), int(admission.source[row, 0, move])
                assert real[row, source], "padding was given a slot"
                assert slot not in taken, "one slot was given out twice"
                assert admission.positions[row, 0, move] == self.columns + source
                taken.add(slot)
                self.held[row, 0, slot] = self.columns + source
        self.columns += tokens
        self.real += real.sum(-1)


def expected(real, keep):
    """Positions that one row keeps of its columns `real` `[columns]`."""
    columns = real.nonzero()[:, 0].tolist()
    return [columns[i] for i in keep.stored(len(columns))]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("policy", "keep"), BUDGETS.values(), ids=BUDGETS)
def test_what_stays_is_the_first_and_the_last_real_tokens(policy, keep, seed):
    draw = random.Random(seed)
    rows, seen = 4, torch.zeros(4, 0, dtype=torch.bool)
    table = Table(policy, rows)
    for _ in range(12):
        tokens = draw.choice([1, 1, 1, 2, 5, 9, 20])
        share = draw.choice([0.0, 0.3, 0.9, 1.0])
        real = torch.tensor([[draw.random() < share for _ in range(tokens)] for _ in range(rows)])
        seen = torch.cat([seen, real], 1)
        table.feed(real)
        for row in range(rows):
            held = table.held[row, 0]
            assert sorted(held[held >= 0].tolist()) == expected(seen[row], keep)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_slots_hold_the_sinks(seed):
    """The layer re-rotates slots 0 … sinks - 1, so they must be the row's first real tokens, in order."""
    draw = random.Random(seed)
    policy, table, seen = SinkWindow(3, 4), Table(SinkWindow(3, 4), 3), torch.zeros(3, 0, dtype=torch.bool)
    for _ in range(14):
        real = torch.tensor([[draw.random() < 0.6 for _ in range(draw.choice([1, 1, 2, 6]))]] * 1)
        real = torch.cat([real, torch.ones_like(real), torch.flip(real, (-1,))])
        seen = torch.cat([seen, real], 1)
        table.feed(real)
        for row in range(3):
            first = seen[row].nonzero()[:, 0].tolist()[: policy.sinks]
            assert table.held[row, 0, : len(first)].tolist() == first


@pytest.mark.parametrize(("policy", "keep"), BUDGETS.values(), ids=BUDGETS)
def test_one_certain_token_takes_the_place_of_the_oldest_but_the_sinks(policy, keep):
    """The shortcut of a decode step against the long way."""
    held = torch.tensor(keep.stored(30))[None, None]
    held = held[..., torch.cat([torch.arange(keep.sinks), keep.sinks + torch.randperm(keep.window)])]
    new, index = torch.tensor([[[30]]]), torch.tensor([[[30]]])
    short, long = (choose(policy, held, new, index, newest_stays=certain) for certain in (True, False))
    assert torch.equal(short.slots, long.slots)
    assert torch.equal(short.source, long.source)
    assert torch.equal(short.positions, long.positions)
    assert held[0, 0, short.slots[0, 0, 0]] == keep.stored(30)[keep.sinks]


def test_policies_are_frozen_and_compare_by_value():
    assert Window(4) == Window(4) != Window(5)
    assert SinkWindow(1, 4) != SinkWindow(1, 4, positions="original")
    with pytest.raises(AttributeError):
        Window(4).window = 5
    assert Window(4).budget == 4
    assert SinkWindow(2, 6).budget == 8
