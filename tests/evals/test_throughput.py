"""Decode timing: what is timed is right, everybody gets the same turns, and a wrong cache gets no ratio.

No test looks at how long anything took.
"""

import json

import pytest
import torch
from transformers import DynamicCache

from evals import specs, throughput
from evals.errors import InputError
from evals.throughput import Entrant, Throughput, Timing

QUICK = Timing(rounds=2, steps=2, warmup=1)
CACHES = ["dense", "int4", "window:window=64", "streaming:sinks=4,window=60", "transformers:static", "transformers:fp8"]


@pytest.mark.parametrize("batch", [1, 3])
def test_every_cache_is_filled_timed_and_compared(tiny, batch):
    work = Throughput(tiny, CACHES, prompts=[80], tokens=[300], batches=[batch], timing=QUICK)
    records = {}
    for piece in work.pieces():
        ticks = []
        records[piece.key] = json.loads(json.dumps(work.measure(piece, ticks.append)))
        assert sum(ticks) == piece.size
        assert piece.timed
    found = {entry["spec"]: entry for entry in work.results(records)}
    assert list(found) == [specs.REFERENCE, *CACHES]
    for spec, entry in found.items():
        for timing in (*entry["prefill"], *entry["decode"]):
            assert timing["fault"] is None, spec
            assert timing["ratio_low"] <= timing["ratio"] <= timing["ratio_high"]
            assert timing["batch"] == batch
        [decode], [prefill] = entry["decode"], entry["prefill"]
        assert decode["tokens_per_second"] == pytest.approx(1000 * batch / decode["ms"])
        assert prefill["kl"] < 1e-6  # no cache changes a prompt's own attention
    assert found[specs.REFERENCE]["decode"][0]["ratio"] == 1
    assert found["dense"]["decode"][0]["kl"] < 1e-6
    assert found["int4"]["decode"][0]["held_bytes"] < found["dense"]["decode"][0]["held_bytes"]
    assert found[specs.REFERENCE]["memory"]["held_bytes"] == 301 * batch * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 600])
def test_filling_repeats_the_states_to_length(tiny, tokens):
    tile, _ = throughput.real_states(tiny)
    cache = throughput.filled(specs.REFERENCE, tiny.model, tile, tokens, tokens)
    keys = cache.layers[1].keys
    assert keys.shape[2] == tokens
    assert torch.equal(keys[:, :, -1], tile[1][0][:, :, (tokens - 1) % throughput.TILE])


def test_a_cache_that_holds_everything_and_answers_wrong_gets_no_ratio(tiny):
    tile, token = throughput.real_states(tiny)
    good, bad = (throughput.filled(specs.REFERENCE, tiny.model, tile, 100, 100) for _ in range(2))
    bad.layers[0].values.neg_()
    both = [Entrant("transformers:dynamic", good, seconds=[1.0]), Entrant("transformers:static", bad, seconds=[0.5])]
    throughput.check(tiny.model, both, token)
    told = throughput.summary(both[1], both[0], 100, 1, 1)
    assert told["ratio"] is None
    assert "differs" in told["fault"]
    assert throughput.summary(both[0], both[0], 100, 1, 1)["ratio"] == 1


def test_a_wrong_row_of_a_batch_is_seen(tiny):
    """A cache is compared in every row, not only in the first."""
    wanted = torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()
    wrong = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    entrant = Entrant("dense")
    throughput.judge(entrant, wrong, wanted, 1e-4)
    assert "differs" in entrant.fault


def test_spare_capacity_is_not_content(tiny):
    """At 20 tokens int4 reserves more than the full cache holds, and may differ; full precision may not."""
    tile, token = throughput.real_states(tiny)
    order = [specs.REFERENCE, "int4:group_size=4,residual=0,sinks=0", "dense"]
    three = [Entrant(spec, throughput.filled(spec, tiny.model, tile, 20, 30)) for spec in order]
    three[2].cache.layers[0].values.neg_()
    throughput.check(tiny.model, three, token)
    assert three[1].memory["held_bytes"] > three[0].memory["held_bytes"] and three[1].kl > 1e-4
    assert [entrant.fault is None for entrant in three] == [True, True, False]


def test_a_cache_that_answers_nonsense_gets_no_ratio(tiny):
    tile, token = throughput.real_states(tiny)
    good = throughput.filled(specs.REFERENCE, tiny.model, tile, 100, 100)
    bad = DynamicCache(config=tiny.model.config)
    for index in range(2):
        bad.update(*(torch.full((1, 2, 10, 16), float("nan")) for _ in range(2)), index)
    both = [Entrant("transformers:dynamic", good), Entrant("transformers:fp8", bad)]
    throughput.check(tiny.model, both, token)
    assert both[1].fault == "its output is not finite"


def test_ratios_are_taken_round_by_round():
    held = {"held_bytes": 0}
    reference = Entrant("transformers:dynamic", memory=held, seconds=[1.0, 2.0, 4.0])
    own = Entrant("dense", memory=held, seconds=[0.5, 1.0, 3.0])
    told = throughput.summary(own, reference, 100, 4, 4)
    assert (told["ratio"], told["ratio_low"], told["ratio_high"]) == (0.5, 0.5, 0.75)
    assert told["ms"] == 1000
    assert told["tokens_per_second"] == 4


@pytest.mark.parametrize("name", ["rounds", "steps", "warmup"])
def test_no_turns_at_all_is_refused(name):
    with pytest.raises(InputError, match=f"--{name}: got 0"):
        Timing(**{name: 0})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"tokens": [0]}, "--tokens: got 0"),
        ({"batches": [0]}, "--batch: got 0"),
        ({"prompts": [2049]}, "--prompt: got 2,049, accepted is up to the model's 2,048 positions"),
    ],
    ids=["tokens", "batch", "prompt"],
)
def test_impossible_lengths_are_named(tiny, arguments, named):
    with pytest.raises(InputError, match=named):
        Throughput(tiny, [], **arguments)
