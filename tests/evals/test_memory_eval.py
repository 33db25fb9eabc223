"""The memory eval: plans against counts for all that can be stored, the watch over resident memory, runs in two parts.

No test looks at a peak of a case: resident memory is not the cache's alone.
"""

import json
import random
import time

import pytest
import torch

import kvplug
from evals import console, memory, runner, specs
from evals.errors import InputError
from evals.memory import MIB, Memory, ResidentPeak, release
from kvplug.codecs import CODECS

PLAIN = ["window:window=64", "streaming:sinks=4,window=60"]
CACHES = [*CODECS, "quant:keys=int8,values=int4", *PLAIN, *(f"{policy}+int4" for policy in PLAIN)]
# Below, at and above the windows and a slab; one token of prompt alone.
LENGTHS, BATCHES, NEW = (1, 61, 253, 600), (1, 3), 3


def windows(count, length):
    return torch.randint(0, 256, (count, length), generator=torch.Generator().manual_seed(3))


def evaluation(tiny, caches, lengths=(20, 70), batches=(1, 2)):
    return Memory(tiny, caches, 0, None, windows(max(batches), max(lengths) + NEW), lengths, batches, NEW)


@pytest.fixture
def hasty(monkeypatch):
    """For tests that look at no peak: nothing is collected and given back before each, which takes its time."""
    monkeypatch.setattr(memory, "release", lambda: None)


def steady(result):
    """All of a result but the peaks, and how it came about."""
    peaks = ("peak_prompt_bytes", "peak_decoding_bytes")
    return [
        {**entry, "cases": [{k: v for k, v in case.items() if k not in peaks} for case in entry["cases"]]}
        for entry in result["results"]
    ]


@pytest.mark.parametrize("spec", CACHES)
def test_what_is_foretold_is_held(tiny, spec, hasty):
    work = evaluation(tiny, [spec], LENGTHS, BATCHES)
    for piece in work.pieces():
        if piece.of[0] == spec:
            record = work.measure(piece, lambda n: None)
            assert record["predicted_bytes"] == record["memory"]["held_bytes"] > 0, piece.key
            assert record["memory"]["report_agrees"], piece.key


def test_a_run_tells_both_figures_and_their_agreement(tiny, tmp_path, hasty):
    ticks = []
    work = evaluation(tiny, ["dense", "int4"])
    for piece in work.pieces():
        ticks.clear()
        work.measure(piece, ticks.append)
        assert sum(ticks) == piece.size
    result = runner.run(work, tmp_path)
    full, dense, int4 = result["results"]
    # 2 layers of 2 KV heads of 16 channels, keys and values, 4 bytes each
    assert [case["held_bytes"] for case in full["cases"]] == [512 * t * b for b in (1, 2) for t in (23, 73)]
    assert all(case["predicted_bytes"] is None and case["ratio"] == 1 for case in full["cases"])
    assert all(case["agrees"] is True for entry in (dense, int4) for case in entry["cases"])
    assert int4["memory"]["held_bytes"] == int4["cases"][-1]["held_bytes"]
    assert full["memory"]["bits_held"] == 32
    assert [curve["batch"] for curve in dense["planned"]] == [1, 2] and not full["planned"]
    for curve in dense["planned"]:
        ends = [case["held_bytes"] for case in dense["cases"] if case["batch"] == curve["batch"]]
        assert [curve["points"][i] for i in (0, -1)] == [[23, ends[0]], [73, ends[1]]]
    assert "NO" not in (tmp_path / "report.md").read_text()
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_a_plan_that_is_off_by_one_byte_is_shown(tiny, tmp_path, monkeypatch, hasty):
    right = kvplug.plan

    class Wrong:
        def __init__(self, *args, **kwargs):
            self.total = right(*args, **kwargs).total - 1

    monkeypatch.setattr(kvplug, "plan", Wrong)
    result = runner.run(evaluation(tiny, ["int8"]), tmp_path)
    assert [case["agrees"] for case in result["results"][1]["cases"]] == [False] * 4
    assert (tmp_path / "report.md").read_text().count("| NO: +1 |") == 4


def test_a_model_without_a_plan_is_measured_all_the_same(tiny, tmp_path, monkeypatch, hasty):
    def refuse(*args, **kwargs):
        raise ValueError("the size of layer 1 is not known")

    monkeypatch.setattr(kvplug, "plan", refuse)
    result = runner.run(evaluation(tiny, ["int8"]), tmp_path)
    assert [case["agrees"] for case in result["results"][1]["cases"]] == [None] * 4
    assert "`int8` is not predicted: the size of layer 1 is not known" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("stop", [1, 5])
def test_a_run_in_two_parts_is_one_run(tiny, tmp_path, monkeypatch, stop, hasty):
    whole = runner.run(evaluation(tiny, ["int8", PLAIN[0]]), tmp_path / "whole")
    measure, done = Memory.measure, []

    def stopped(work, piece, tick):
        if len(done) == stop:
            raise KeyboardInterrupt
        done.append(piece.key)
        return measure(work, piece, tick)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Memory, "measure", stopped)
        runner.run(evaluation(tiny, ["int8", PLAIN[0]]), tmp_path / "parts")
    again = []
    monkeypatch.setattr(
        Memory, "measure", lambda work, piece, tick: again.append(piece.key) or measure(work, piece, tick)
    )
    parts = runner.run(evaluation(tiny, ["int8", PLAIN[0]]), tmp_path / "parts")
    assert len(done) == stop and not set(done) & set(again) and len(done + again) == 12
    assert steady(parts) == steady(whole)
    told = json.loads((tmp_path / "parts" / "report.json").read_text())
    assert steady(told) == steady(parts)


def test_a_line_keeps_its_corners_alone():
    points = [(1, 5), (2, 5), (3, 5), (4, 9), (5, 9), (6, 9)]
    assert memory.corners(points) == [(1, 5), (3, 5), (4, 9), (6, 9)]
    assert memory.corners([(1, 5), (2, 6), (3, 7)]) == [(1, 5), (2, 6), (3, 7)]
    assert memory.corners([(1, 5)]) == [(1, 5)]


def allocate(mebibytes, seconds):
    """Makes so many MiB resident, and frees them again after a while."""
    block = torch.ones(mebibytes * MIB, dtype=torch.uint8)
    time.sleep(seconds)
    del block


# What else the process may take or give back meanwhile: the thread's stack, and the kernel's count of resident pages,
# which it keeps in batches of a few hundred KiB for each processor.
NOISE = 8 * MIB


def test_resident_memory_that_is_freed_again_is_seen():
    release()
    with ResidentPeak() as calm:
        pass
    with ResidentPeak() as seen:
        allocate(200, 0.05)
    assert abs(seen.peak - calm.peak - 200 * MIB) < NOISE


def test_the_highest_of_many_peaks_is_kept_wherever_it_comes():
    """Each lasts for ten looks and more, so that only a thread that is never let run would miss it."""
    release()
    with ResidentPeak() as calm:
        pass
    sizes = [40, 80, 120, 160]
    for seed in range(3):
        order = random.Random(seed).sample(sizes, len(sizes))
        with ResidentPeak() as seen:
            for size in order:
                allocate(size, 0.03)
        assert abs(seen.peak - calm.peak - 160 * MIB) < NOISE, order


def test_the_watch_ends_with_its_body():
    with pytest.raises(RuntimeError, match="body"), ResidentPeak() as seen:
        raise RuntimeError("body")
    assert not seen._thread.is_alive() and seen.peak > 0


def test_a_peak_counts_from_what_was_there_before():
    before = memory.in_use([torch.device("cpu")])
    kept = torch.ones(100 * MIB, dtype=torch.uint8)
    assert abs(memory.peak_above(before, lambda: allocate(50, 0.05)) - 150 * MIB) < NOISE
    del kept
    assert memory.peak_above(before, lambda: None) < NOISE


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--length", 0], "--length: got 0"),
        (["--batch", 0], "--batch: got 0"),
        (["--new-tokens", 0], "--new-tokens: got 0"),
        (["--length", 2040], "--length: got 2,040"),
        (["--cache", "int5"], "--cache: 'int5'"),
    ],
)
def test_what_can_not_be_is_named(tiny_folder, tmp_path, capsys, options, named):
    with pytest.raises(SystemExit) as ended:
        console.run(memory.main, ["--model", str(tiny_folder), "--out", str(tmp_path / "out"), *map(str, options)])
    assert ended.value.code == 2
    assert f"error: {named}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_are_sorted_and_unique():
    assert memory.positive("--length", [5, 2, 5]) == (2, 5)
    with pytest.raises(InputError, match="--length: got -1"):
        memory.positive("--length", [5, -1])


def test_the_reference_comes_first(tiny):
    assert evaluation(tiny, ["int8"]).pieces()[0].of[0] == specs.REFERENCE
