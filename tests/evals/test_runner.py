"""The runner: nothing depends on how a run was shared out, or on whether it was stopped in between."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from evals import report, runner
from evals.runner import Eval, Journal, Piece

ROOT = Path(__file__).parents[2]


@dataclass
class Draws(Eval):
    """Draws a random number in each piece; `measured` lists the pieces that really ran."""

    count: int = 5
    stop_at: int | None = None
    measured: list[str] = field(default_factory=list)

    name: ClassVar[str] = "draws"
    title: ClassVar[str] = "Draws"

    def protocol(self):
        return {"count": self.count}

    def pieces(self):
        return [Piece(f"piece {i}", 1, (i,), timed=i == 3) for i in range(self.count)]

    def measure(self, piece, tick):
        if piece.of[0] == self.stop_at:
            raise KeyboardInterrupt
        self.measured.append(piece.key)
        tick(1)
        return {"drawn": torch.rand(()).item() + piece.of[0]}

    def results(self, records):
        return [{"spec": "none", "drawn": [record["drawn"] for record in records.values()], "memory": None}]

    def tables(self, result):
        return [report.Table("Draws", ["cache", "drawn"], [["none", str(result["results"][0]["drawn"])]])]

    def draw(self, result, path):
        path.write_bytes(b"no picture")


def test_a_run_leaves_its_report_and_nothing_else(tiny, tmp_path):
    result = runner.run(Draws(tiny, []), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draws.png", "report.html", "report.json", "report.md"]
    assert json.loads((tmp_path / "report.json").read_text()) == result


def test_a_stopped_run_goes_on_where_it_was(tiny, tmp_path, capsys):
    whole = runner.run(Draws(tiny, []), tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        runner.run(Draws(tiny, [], stop_at=2), tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "report.json").exists()
    assert "the same command goes on from here" in capsys.readouterr().out
    again = Draws(tiny, [])
    result = runner.run(again, tmp_path / "stopped")
    assert sorted(again.measured) == ["piece 2", "piece 3", "piece 4"]
    assert "2 of 5 pieces are done" in capsys.readouterr().out
    assert result["results"] == whole["results"]
    third = Draws(tiny, [])
    runner.run(third, tmp_path / "stopped")
    assert len(third.measured) == 5, "a finished run is not taken up again"


def test_another_run_is_never_taken_up(tiny, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        runner.run(Draws(tiny, [], stop_at=2), tmp_path)
    for other in (Draws(tiny, [], seed=1), Draws(tiny, [], count=6), Draws(tiny, ["int4"])):
        runner.run(other, tmp_path)
        assert len(other.measured) == other.count
    first = Draws(tiny, [])
    runner.run(first, tmp_path)
    assert len(first.measured) == 3, "what the other runs did not touch is still there"


def test_a_line_that_was_cut_off_is_measured_again(tmp_path):
    journal = Journal(tmp_path, "a" * 64, 0)
    journal.add("one", {"x": 1})
    journal.add("two", {"x": 2})
    journal.close()
    text = journal.path.read_text()
    journal.path.write_text(text[:-4])
    assert journal.read() == {"one": {"x": 1}}
    journal.add("two", {"x": 3})
    journal.close()
    assert journal.read() == {"one": {"x": 1}, "two": {"x": 3}}


def test_numbers_survive_the_journal_bit_for_bit(tmp_path):
    journal = Journal(tmp_path, "b" * 64, 0)
    wanted = {"x": [0.1, 1 / 3, 5e-324, float("inf")], "none": None}
    journal.add("one", wanted)
    journal.close()
    assert journal.read() == {"one": wanted}


def launched(folder, processes, tmp_path):
    """The report of `evals.perplexity` in one or more processes, each on one thread."""
    out = tmp_path / f"by {processes}"
    options = [
        "--model",
        folder,
        "--prefill",
        30,
        "--length",
        90,
        "--windows",
        3,
        "--cache",
        "int4:residual=0",
        "--out",
        out,
    ]
    options += ["--cache", "window:window=30"]
    start = [sys.executable, "-m"]
    if processes > 1:
        # Accelerate's switch for several processes on one machine, CPUs included.
        start += ["accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes)]
        start += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        start += ["--main_process_port", "0", "-m"]
    done = subprocess.run(
        [*start, "evals.perplexity", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Written to") == 1
    # The first process shows a bar over its own share: nine pieces of 89 tokens.
    assert f"/{9 // processes * 89} [" in done.stderr
    return json.loads((out / "report.json").read_text())


def close(one, other):
    """Whether two results are the same, numbers to 1e-6."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    return one == pytest.approx(other, abs=1e-6, rel=1e-6) if isinstance(one, float) else one == other


def test_two_processes_measure_what_one_does(tiny_folder, tmp_path):
    one, two = (launched(tiny_folder, processes, tmp_path) for processes in (1, 2))
    assert one["protocol"]["windows"] == 3
    assert close(one["results"], two["results"])
    assert one["results"][1]["quality"]["kl"] > 1e-5
