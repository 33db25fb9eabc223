"""Decode timing: what is timed is right, everybody gets the same turns, and a wrong cache gets no ratio.

No test looks at how long anything took.
"""

import pytest
import torch
from transformers import DynamicCache

from evals import specs, throughput
from evals.errors import InputError
from evals.throughput import Runner, Timing

QUICK = Timing(rounds=2, steps=2, warmup=1)
CACHES = ["dense", "int4", "window:window=64", "streaming:sinks=4,window=60", "transformers:static", "transformers:fp8"]


def test_every_cache_is_filled_timed_and_compared(tiny):
    ticks = []
    found = throughput.measure(tiny, CACHES, tokens=300, timing=QUICK, tick=ticks.append)
    assert list(found) == [specs.REFERENCE, *CACHES]
    assert sum(ticks) == throughput.turns(CACHES, QUICK)
    for spec, timing in found.items():
        assert timing["fault"] is None, spec
        assert timing["ratio_low"] <= timing["ratio"] <= timing["ratio_high"]
    assert found[specs.REFERENCE]["ratio"] == 1
    assert found["dense"]["kl"] < 1e-6
    assert found["int4"]["held_bytes"] < found["dense"]["held_bytes"]


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
    runners = [Runner("transformers:dynamic", good, seconds=[1.0]), Runner("transformers:static", bad, seconds=[0.5])]
    throughput.check(tiny.model, runners, token)
    told = throughput.summary(runners[1], runners[0], 100)
    assert told["ratio"] is None
    assert "differs" in told["fault"]
    assert throughput.summary(runners[0], runners[0], 100)["ratio"] == 1


def test_spare_capacity_is_not_content(tiny):
    """At 20 tokens int4 reserves more than the full cache holds, and may differ; full precision may not."""
    tile, token = throughput.real_states(tiny)
    order = [specs.REFERENCE, "int4", "dense"]
    runners = [Runner(spec, throughput.filled(spec, tiny.model, tile, 20, 30)) for spec in order]
    runners[2].cache.layers[0].values.neg_()
    throughput.check(tiny.model, runners, token)
    assert runners[1].bytes > runners[0].bytes and runners[1].kl > 1e-4
    assert [runner.fault is None for runner in runners] == [True, True, False]


def test_a_cache_that_answers_nonsense_gets_no_ratio(tiny):
    tile, token = throughput.real_states(tiny)
    good = throughput.filled(specs.REFERENCE, tiny.model, tile, 100, 100)
    bad = DynamicCache(config=tiny.model.config)
    for index in range(2):
        bad.update(*(torch.full((1, 2, 10, 16), float("nan")) for _ in range(2)), index)
    runners = [Runner("transformers:dynamic", good), Runner("transformers:fp8", bad)]
    throughput.check(tiny.model, runners, token)
    assert runners[1].fault == "its output is not finite"


def test_ratios_are_taken_round_by_round():
    reference = Runner("transformers:dynamic", None, seconds=[1.0, 2.0, 4.0])
    own = Runner("dense", None, seconds=[0.5, 1.0, 3.0])
    told = throughput.summary(own, reference, 100)
    assert (told["ratio"], told["ratio_low"], told["ratio_high"]) == (0.5, 0.5, 0.75)
    assert told["ms_per_token"] == 1000


@pytest.mark.parametrize("name", ["rounds", "steps", "warmup"])
def test_no_turns_at_all_is_refused(name):
    with pytest.raises(InputError, match=f"--{name}: got 0"):
        Timing(**{name: 0})
