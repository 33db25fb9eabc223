"""The latent eval on a tiny model: both ways give the same, and its figures are those of what ran."""

import pytest
import torch

from evals import latent
from evals.errors import InputError
from evals.latent import Latent, Load
from evals.models import Loaded
from tests import models


@pytest.fixture
def work(monkeypatch):
    monkeypatch.setattr(latent, "CONTEXT", 24)
    monkeypatch.setattr(latent, "PROMPT", 16)
    monkeypatch.setattr(latent, "CODECS", ["int4", "dense", "int8"])
    rows = models.tokens(2, 24)
    load = Load(tokens=(30,), rounds=2, forwards=1)
    return Latent(Loaded("tiny", models.tiny_deepseek(), None), latent.CODECS, rows=rows, load=load)


def test_figures_are_those_of_what_ran(work, tmp_path):
    ticks = []
    records = {piece.key: work.measure(piece, ticks.append) for piece in work.pieces()}
    assert sum(ticks) == sum(piece.size for piece in work.pieces())
    entries = work.results(records)
    timed = {entry["spec"]: entry["decode"][0] for entry in entries if "decode" in entry}
    assert list(timed) == latent.SPEEDS
    assert timed["transformers:dynamic"]["ratio"] == 1.0
    # The prediction is the reference's, whichever way it was made; 8 bits move it a little.
    assert timed["dense"]["kl"] < 1e-6
    assert timed["absorbed dense"]["kl"] < 1e-6
    assert 0 < timed["absorbed int8"]["kl"] < 0.1
    first = records["decoding at 30"]
    ratios = [a / b for a, b in zip(first["dense"]["ms"], first["transformers:dynamic"]["ms"], strict=True)]
    assert (timed["dense"]["low"], timed["dense"]["high"]) == (min(ratios), max(ratios))
    quality = {entry["spec"]: entry["quality"] for entry in entries if "quality" in entry}
    assert quality["dense"]["kl"] == 0
    assert quality["dense"]["bits"] == 32
    assert 8 < quality["int8"]["bits"] < 12
    result = {"results": entries, "model": {"name": "tiny"}}
    assert [len(table.cells) for table in work.tables(result)] == [6, 3]
    latent.draw(result, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 10_000


def test_the_model_is_left_as_it_was(work):
    before = dict(vars(work.loaded.model.model.layers[0].self_attn))
    work.measure(work.pieces()[0], lambda count: None)
    assert vars(work.loaded.model.model.layers[0].self_attn) == before


def test_rows_are_none_of_what_is_trained_on():
    training, rows = latent.split("\n\n".join(f"paragraph {i} of many, {i * i}" for i in range(4000)))
    assert rows.shape == (latent.ROWS, latent.CONTEXT)
    assert bytes(rows[0].tolist()) not in bytes(training.tolist())


def test_training_lowers_the_loss(monkeypatch):
    monkeypatch.setattr(latent, "CONTEXT", 24)
    model, data = models.tiny_deepseek(initializer_range=0.02), torch.arange(60).repeat(20)
    loss = []
    for _ in range(2):
        with torch.no_grad():
            loss.append(model(data[None, :24], labels=data[None, :24]).loss)
        latent.train(model, data, 20, 0)
    assert loss[1] < loss[0] - 0.5


@pytest.mark.parametrize(("name", "value"), [("steps", 0), ("tokens", (0,)), ("rounds", 0)])
def test_a_load_that_cant_be_is_an_input_error(name, value):
    with pytest.raises(InputError, match=f"--{name}: got 0"):
        Load(**{name: value})
