"""The paging eval on a tiny model: what it compares is the same, and its figures are those of what ran."""

import pytest
import torch

from evals import paging
from evals.errors import InputError
from evals.paging import Load, Paging


@pytest.fixture
def work(tiny):
    ids = torch.randint(1, 256, (2, 96), generator=torch.Generator().manual_seed(4))
    return Paging(tiny, ["paged"], ids=ids, load=Load(tokens=96, new=6, sampled=4, rounds=2, page_size=8))


@pytest.fixture
def result(work):
    records = {piece.key: work.measure(piece, lambda runs: None) for piece in work.pieces()}
    return records, work.results(records)


def test_figures_are_those_of_what_ran(work, result):
    records, (full, paged) = result
    assert (full["spec"], paged["spec"]) == ("transformers:dynamic", "paged")
    assert full["figures"]["beam_step"] == [1.0, 1.0]
    first = records["beams, round 1"]
    assert paged["figures"]["beam_call"][0] == first["paged"]["call"] / first["transformers:dynamic"]["call"]
    # 90% of 96 tokens in whole pages of 8.
    assert paged["known_tokens"] == [80, 80]
    assert paged["same_first_token"]
    assert full["figures"]["sample_bytes"] == [8.0]
    assert 1 < paged["figures"]["sample_bytes"][0] < 3
    assert 0 < paged["figures"]["idle"][0] < 0.5
    assert paged["memory"]["report_agrees"]
    assert paged["memory"]["held_bytes"] < full["memory"]["held_bytes"] / 2


def test_texts_that_differ_are_told(work, monkeypatch):
    wrong = {"step": 1, "call": 1, "reorder": 1, "memory": None}
    monkeypatch.setattr(Paging, "_beams", lambda self, spec: wrong | {"text": [len(spec)]})
    with pytest.raises(RuntimeError, match="different texts"):
        work.measure(work.pieces()[0], lambda runs: None)


def test_the_report_names_what_was_asked(work, result):
    _, entries = result
    told = {"results": entries}
    assert len(work.tables(told)) == 1
    assert "96 tokens; 4 beams and 6 new tokens; 8 samples of 4 tokens; 90%" in work.notes(told)[0]


def test_the_picture_is_drawn(work, result, tmp_path):
    paging.draw({"results": result[1], "model": {"name": "tiny"}}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 10), ("beams", 1), ("shared", 1.0), ("rounds", 0)], ids=lambda x: str(x)
)
def test_an_impossible_load_is_named(name, value):
    with pytest.raises(InputError, match=f"--{name}: got {value}"):
        Load(**{name: value})
