"""The sharing eval on a tiny model: what it searches on, what it names, and that its figures are those of what ran."""

import itertools
import json

import pytest
import torch

from evals import sharing
from evals.errors import InputError
from evals.texts import Windows
from kvplug import SharingPlan
from tests.evals.test_command_line import run


def windows(starts, tokens):
    return Windows(torch.zeros(len(starts), tokens, dtype=torch.long), starts, 1000)


def test_pieces_lie_outside_of_the_windows():
    ids = torch.arange(1000)
    pieces = sharing.outside(ids, windows([100, 500], 150), 4, 60)
    assert [len(piece) for piece in pieces] == [60] * 4
    for piece in pieces:
        assert piece.tolist() == list(range(int(piece[0]), int(piece[0]) + 60))
        for start in (100, 500):
            assert piece[-1] < start or piece[0] >= start + 150
    starts = [int(piece[0]) for piece in pieces]
    assert starts == sorted(set(starts))
    assert all(b - a >= 60 for a, b in itertools.pairwise(starts))


def test_a_text_without_room_for_pieces():
    with pytest.raises(InputError, match="room for 1 pieces of 60 tokens, and 2 are needed"):
        sharing.outside(torch.arange(300), windows([100], 200), 2, 60)


@pytest.mark.parametrize(
    ("groups", "layers", "named"),
    [([[0, 3], [1, 5, 6]], 8, "2-3/4-5/6-7"), ([[0, 1]], 2, "0-1"), ([[0, 1, 2, 3]], 5, "1-2/3-4")],
)
def test_neighbours_are_as_many_as_the_plan_shares(groups, layers, named):
    assert sharing.neighbours(SharingPlan(groups, 0.5, {}, {}), layers) == named


def test_the_whole_command(tiny_folder, tmp_path):
    fixed = ["--model", tiny_folder, "--prefill", 60, "--length", 120, "--share", 0.5]
    fixed += ["--pieces", 2, "--piece-tokens", 40, "--basis-tokens", 100]
    caches = ["shared:plan={plan}", "shared:groups={neighbours}", "minicache", "lowrank:plan={low_rank},rank=0.5"]
    options = [word for cache in caches for word in ("--cache", cache)]
    assert run(sharing.main, *fixed, *options, "--out", tmp_path / "out") == 0
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    full, plan, neighbours, merged, low_rank = told["results"]
    assert plan["spec"] == f"shared:plan={tmp_path / 'out' / 'plan.json'}"
    assert neighbours["spec"] == "shared:groups=0-1"
    # Of two layers one pair may share: both are the same.
    assert plan["quality"]["kl"] == pytest.approx(neighbours["quality"]["kl"], rel=1e-4)
    held = plan["memory"]["report"]
    assert 2 * (held["keys"] + held["values"]) == held["dense_total"] == full["memory"]["held_bytes"]
    assert 0 < low_rank["quality"]["kl"] < plan["quality"]["kl"]
    assert 0 < merged["quality"]["kl"] < plan["quality"]["kl"]
    assert (tmp_path / "out" / "sharing.png").stat().st_size > 10_000
    # A plan that was found before is used as it is.
    options = ["--cache", "shared:plan={plan}", "--plan", tmp_path / "out" / "plan.json"]
    assert run(sharing.main, *fixed, *options, "--out", tmp_path / "again") == 0
    again = json.loads((tmp_path / "again" / "report.json").read_text())["results"][1]
    assert again["quality"] == plan["quality"]
    assert not (tmp_path / "again" / "plan.json").exists()


def test_too_few_tokens_are_an_input_error(tiny_folder, tmp_path, capfd):
    fixed = ["--model", tiny_folder, "--prefill", 60, "--length", 120, "--share", 0.5, "--pieces", 1]
    fixed += ["--piece-tokens", 20, "--basis-tokens", 30, "--cache", "lowrank:plan={low_rank}"]
    assert run(sharing.main, *fixed, "--out", tmp_path) == 2
    assert "--basis-tokens: texts have 26 tokens" in capfd.readouterr().err
