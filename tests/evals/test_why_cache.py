"""The lesson on why there is a cache: work counted against work reckoned by hand, bytes against their formula.

No test looks at how long anything took.
"""

import json

import pytest
import torch

import kvplug
from evals import console, lesson, runner, specs, why_cache
from evals.errors import InputError
from evals.lesson import NONE
from evals.models import Loaded, forward
from evals.why_cache import Course, WhyCache

DENSE = "dense"


def by_hand(config, fed, seen, predicted=1):
    """FLOPs of one forward of `fed` tokens, the last of `seen`: weights, attention over all pairs, logits."""
    width, heads, kv_heads = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    hidden = config.hidden_size
    weights = 2 * hidden * heads * width + 2 * hidden * kv_heads * width + 3 * hidden * config.intermediate_size
    attention = 2 * heads * fed * seen * 2 * width
    return config.num_hidden_layers * (2 * fed * weights + attention) + 2 * predicted * hidden * config.vocab_size


def run_by_hand(config, prompt, tokens, cached):
    """FLOPs of a whole generation."""
    if not cached:
        return sum(by_hand(config, prompt + i, prompt + i) for i in range(tokens))
    return by_hand(config, prompt, prompt) + sum(by_hand(config, 1, prompt + i) for i in range(1, tokens))


@pytest.fixture(scope="module")
def small():
    return Loaded(why_cache.SMALL, why_cache.small(), None)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kv_heads", why_cache.SHARED.values(), ids=why_cache.SHARED)
@torch.no_grad()
def test_the_flops_of_a_forward_are_those_reckoned_by_hand(kv_heads, attention):
    model = why_cache.small(kv_heads)
    model.set_attn_implementation(attention)
    ids = torch.arange(40)[None]
    with why_cache.counter() as counted:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    assert counted.get_total_flops() == by_hand(model.config, 40, 40)
    cache = specs.build(specs.REFERENCE, model, capacity=60)
    forward(model, ids, cache, logits_to_keep=1)
    with why_cache.counter() as counted:
        forward(model, ids[:, :3], cache, logits_to_keep=1)
    assert counted.get_total_flops() == by_hand(model.config, 3, 43)


def test_the_default_model_and_prompt_show_the_growth(small):
    """Reckoned by hand, which the test above holds to what is counted, for the numbers that the lesson starts with."""
    course = Course()
    growth = {
        cached: [run_by_hand(small.model.config, course.prompt, n, cached) for n in course.generated]
        for cached in (False, True)
    }
    means = {cached: (work[2] / work[0]) ** 0.5 for cached, work in growth.items()}
    assert 4.6 <= means[False] <= 4.8
    assert 2.15 <= means[True] <= 2.25


@pytest.fixture(scope="module")
def done(small, tmp_path_factory):
    """A short lesson from end to end, with a third run through a cache of ours."""
    out = tmp_path_factory.mktemp("lesson")
    course = Course(prompt=3, generated=(16, 32, 64), context=40, batches=(1, 4), memory=16 * 2**20)
    return runner.run(WhyCache(small, [DENSE], 0, None, course), out), out


def test_all_runs_write_the_same_tokens(done):
    result, _ = done
    assert [entry["spec"] for entry in result["results"]] == [NONE, specs.REFERENCE, DENSE]
    assert [entry["differs_at"] for entry in result["results"]] == [None] * 3
    tokens = [entry["tokens"] for entry in result["results"]]
    assert tokens[0] == tokens[1] == tokens[2] and len(tokens[0]) == 64
    assert len(set(tokens[0])) > 8, "a model that repeats itself proves little"


def test_the_counted_work_of_a_run_is_the_one_reckoned_by_hand(done, small):
    for entry in done[0]["results"]:
        for case in entry["generated"]:
            assert case["flops"] == run_by_hand(small.model.config, 3, case["tokens"], entry["spec"] != NONE), entry[
                "spec"
            ]
            assert case["seconds"] > 0
        assert entry["latency"][0]["first"] == 1 and entry["latency"][-1]["last"] == 64


def test_bytes_follow_the_formula_for_all_ways_of_sharing_heads(done):
    found = {one["kind"]: one for one in done[0]["results"][1]["bytes"]}
    # 2 x 8 layers x heads x 16 channels x 4 bytes x 40 tokens
    assert {kind: one["held_bytes"] for kind, one in found.items()} == {
        "MHA": 2 * 8 * 8 * 16 * 4 * 40,
        "GQA": 2 * 8 * 2 * 16 * 4 * 40,
        "MQA": 2 * 8 * 1 * 16 * 4 * 40,
    }
    assert all(one["formula_bytes"] == one["held_bytes"] for one in found.values())


def test_memory_ends_at_the_last_batch_that_fits(done, small):
    result, _ = done
    room = 16 * 2**20 - sum(x.numel() * 4 for x in small.model.parameters())
    limits = {one["spec"]: one["rows"] for one in result["results"][1]["limits"]}
    assert limits[specs.REFERENCE] == room // (2 * 8 * 2 * 16 * 4 * 40)
    assert set(limits) == {specs.REFERENCE, *why_cache.COMPRESSED, DENSE}
    for spec in limits:
        if spec != specs.REFERENCE:
            held = [kvplug.plan(small.model.config, spec, 40, limits[spec] + more).total for more in (0, 1)]
            assert held[0] <= room < held[1], spec


@pytest.mark.parametrize(("room", "fit"), [(0, 0), (9, 0), (10, 1), (19, 1), (20, 2), (1005, 100)])
def test_rows_that_fit(room, fit):
    assert why_cache.rows_that_fit(lambda rows: 10 * rows, room) == fit


def test_a_first_row_that_costs_more_than_the_next_hides_none_of_them():
    assert why_cache.rows_that_fit(lambda rows: 100 + 10 * rows, 200) == 10


def test_the_report_tells_what_to_see(done):
    result, out = done
    text = (out / "report.md").read_text()
    for told in ("With and without", "Prefill and decode", "Bytes", "Rows", "Memory", "the tokens are the same"):
        assert told in text
    assert text.count("| yes |") == 3 + 2 * 3 and "DIFFER" not in text and "NO" not in text
    assert (out / "why_cache.png").stat().st_size > 20_000
    assert json.loads((out / "report.json").read_text())["results"] == result["results"]


def test_tokens_that_differ_are_named(done, small):
    result, _ = done
    records = {f"generate, {entry['spec']}": dict(entry) for entry in result["results"]}
    records["generate, dense"]["tokens"] = [*result["results"][0]["tokens"][:-1], -1]
    records |= {"prefill and decode": {}, **{f"batch {n}": {} for n in (1, 4)}}
    records |= {f"bytes, {kind}": {} for kind in why_cache.SHARED}
    work = WhyCache(small, [DENSE], 0, None, Course(batches=(1, 4)))
    assert [entry["differs_at"] for entry in work.results(records)] == [None, None, 64]
    told = {**result, "results": [*result["results"][:2], {**result["results"][2], "differs_at": 64}]}
    assert lesson.work_table(told).cells[-1][-1] == "NO, from token 64"
    assert "the tokens of dense DIFFER" in " ".join(lesson.notes(told))


def test_a_model_from_outside_is_taught_with_its_own_heads(tiny, tmp_path):
    course = Course(prompt=5, generated=(8,), context=20, batches=(1,), memory=2**20)
    result = runner.run(WhyCache(tiny, [], 0, None, course), tmp_path)
    assert [one["kind"] for one in result["results"][1]["bytes"]] == ["own"]
    assert result["results"][1]["bytes"][0]["held_bytes"] == 512 * 20
    assert lesson.doubling(result["results"][0]) is None


@pytest.mark.parametrize(("told", "count"), [("1GiB", 2**30), ("1.5 KiB", 1536), ("2GB", 2 * 10**9), ("64MiB", 2**26)])
def test_bytes_are_read_with_their_units(told, count):
    assert why_cache.read_bytes(told) == count


@pytest.mark.parametrize("told", ["", "x", "0", "300", "1 gigabyte", "-1MiB", "MiB"])
def test_bytes_that_are_none_are_refused(told):
    with pytest.raises(InputError, match="--memory="):
        why_cache.read_bytes(told)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompt", 0], "--prompt: got 0"),
        (["--generated", 0], "--generated: got 0"),
        (["--context", 0], "--context: got 0"),
        (["--generated", 5000], "--generated, --context: they need 5,001 positions"),
        (["--memory", "1MiB"], "--memory: got 1 MiB"),
        (["--device", "auto"], "--device: got 'auto'"),
        (["--dtype", "int8"], "--dtype: got 'int8'"),
        (["--cache", "int5"], "--cache: 'int5'"),
    ],
)
def test_what_can_not_be_is_named(tmp_path, capsys, options, named):
    with pytest.raises(SystemExit) as ended:
        console.run(why_cache.main, ["--out", str(tmp_path / "out"), *map(str, options)])
    assert ended.value.code == 2
    assert f"error: {named}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
