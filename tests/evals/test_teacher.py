"""Teacher-forced scores against an independent computation: one forward over the whole text, without any cache."""

import pytest
import torch
from transformers import DynamicCache

from evals import perplexity, specs, teacher
from evals.errors import InputError
from evals.teacher import Protocol


@pytest.fixture
def ids():
    return torch.randint(0, 256, (1, 120))


def in_one_forward(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits[0].float().log_softmax(-1)


# Caches that lose nothing: full precision, and budgets that the text does not reach.
EXACT = ["transformers:dynamic", "dense", "window:window=120", "streaming:sinks=4,window=116"]


@pytest.mark.parametrize("step", [1, 7, 16, 200], ids="step {}".format)
@pytest.mark.parametrize("spec", EXACT)
def test_chunked_scores_equal_one_forward(tiny, ids, spec, step):
    protocol = Protocol(prefill=40, step=step, length=120)
    against = teacher.reference(tiny.model, ids, DynamicCache(config=tiny.model.config), protocol)
    with specs.routed(spec, tiny.model):
        cache = specs.build(spec, tiny.model, capacity=120)
        scores = teacher.score(tiny.model, ids, cache, protocol, against)
    whole = in_one_forward(tiny.model, ids)
    # Token 41 is the first whose prediction read the cache back; the last token is only a target.
    wanted = torch.nn.functional.nll_loss(whole[40:119], ids[0, 41:], reduction="none").double()
    assert scores.nll.shape == (79,)
    assert (scores.nll - wanted).abs().max() < 1e-4
    assert scores.kl.max() < 1e-6
    assert scores.agree.min() == 1


def test_targets_are_the_tokens_that_follow(tiny, ids):
    protocol = Protocol(prefill=40, step=8, length=120)
    against = teacher.reference(tiny.model, ids, DynamicCache(), protocol)
    scores = teacher.score(tiny.model, ids, DynamicCache(), protocol, against)
    whole = in_one_forward(tiny.model, ids)
    unshifted = torch.nn.functional.nll_loss(whole[40:119], ids[0, 40:119], reduction="none").double()
    assert (scores.nll - unshifted).abs().max() > 0.1


def test_divergence_is_from_the_reference_to_the_cache():
    # By hand: P = (1/2, 1/2), Q = (1/4, 3/4); KL(P‖Q) = ½ ln 2 + ½ ln ⅔, and KL(Q‖P) is another number.
    p, q = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    scores = teacher.compare(q, p, torch.tensor([0]))
    assert scores.kl.item() == pytest.approx(0.5 * torch.tensor(4 / 3).log().item(), abs=1e-6)
    assert scores.nll.item() == pytest.approx(torch.tensor(4.0).log().item(), abs=1e-6)


def test_tokens_that_the_reference_rules_out_add_nothing():
    p, q = torch.tensor([[1.0, 0.0]]).log(), torch.tensor([[0.5, 0.5]]).log()
    assert teacher.compare(q, p, torch.tensor([0])).kl.item() == pytest.approx(0.6931, abs=1e-4)


def test_the_summary_is_over_all_windows_or_over_a_part_of_each():
    one = {"nll": [1.0, 1.0, 1.0], "kl": [0.0, 0.0, 0.3], "agree": [1.0, 1.0, 0.0]}
    other = {"nll": [5.0, 5.0, 5.0], "kl": [0.1, 0.1, 0.1], "agree": [1.0, 1.0, 1.0]}
    summary = perplexity.summary([one, other], 0, 3)
    assert summary["perplexity"] == pytest.approx(torch.tensor(3.0).exp().item())
    assert summary["kl"] == pytest.approx(0.1)
    assert summary["top1_agreement"] == pytest.approx(5 / 6)
    assert summary["predictions"] == 6
    part = perplexity.summary([one, other], 2, 3)
    assert (part["kl"], part["top1_agreement"], part["predictions"]) == (pytest.approx(0.2), 0.5, 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prefill": 0}, "--prefill: got 0"),
        ({"step": 0}, "--step: got 0"),
        ({"prefill": 100, "length": 101}, r"--length: got 101, accepted is --prefill \+ 2"),
    ],
    ids=["prefill", "step", "length"],
)
def test_an_impossible_protocol_is_named(arguments, named):
    with pytest.raises(InputError, match=named):
        Protocol(**arguments)


def measured(tiny, caches, ids, protocol, bins=4):
    """The entries of the eval, by spec."""
    work = perplexity.Perplexity(tiny, caches, ids=ids, steps=protocol, bins=bins)
    entries = work.results({piece.key: work.measure(piece, lambda tokens: None) for piece in work.pieces()})
    assert [entry["spec"] for entry in entries] == [specs.REFERENCE, *caches]
    return {entry["spec"]: entry for entry in entries}


def test_memory_is_counted_against_the_full_cache(tiny):
    ids = torch.randint(0, 256, (2, 120))
    protocol = Protocol(prefill=60, step=10, length=120)
    found = measured(tiny, ["dense", "int8", "window:window=30", "transformers:static"], ids, protocol)
    assert found[specs.REFERENCE]["memory"]["bits_held"] == 32
    assert found[specs.REFERENCE]["memory"]["held_bytes"] == 119 * 2 * 2 * 2 * 16 * 4
    assert found["dense"]["quality"]["kl"] < 1e-6
    assert 0 < found["int8"]["quality"]["kl"] < found["window:window=30"]["quality"]["kl"]
    assert found["window:window=30"]["memory"]["drops_tokens"]
    assert not found["int8"]["memory"]["drops_tokens"]
    for entry in found.values():
        assert entry["quality"]["predictions"] == 2 * 59
        assert entry["memory"]["report_agrees"] in (True, None)


def test_the_order_of_caches_changes_nothing(tiny):
    ids = torch.randint(0, 256, (1, 120))
    protocol = Protocol(prefill=60, step=10, length=120)
    caches = ["window:window=30", "int4", "transformers:fp8"]
    one = measured(tiny, caches, ids, protocol)
    other = measured(tiny, caches[::-1], ids, protocol)
    assert {spec: e["quality"] for spec, e in one.items()} == {spec: e["quality"] for spec, e in other.items()}


def test_positions_are_cut_into_parts_that_make_up_the_whole(tiny):
    """With true decoding a window changes nothing before it is full, which shows in the first part alone."""
    ids = torch.randint(0, 256, (1, 100))
    protocol = Protocol(prefill=20, step=1, length=100)
    entry = measured(tiny, ["window:window=60"], ids, protocol, bins=2)["window:window=60"]
    first, second = entry["by_position"]
    assert (first["first"], first["last"], second["first"], second["last"]) == (20, 59, 60, 98)
    assert first["kl"] < 1e-6 < 1e-3 < second["kl"]
    total = sum(part["kl"] * part["predictions"] for part in entry["by_position"])
    assert total == pytest.approx(entry["quality"]["kl"] * entry["quality"]["predictions"])
