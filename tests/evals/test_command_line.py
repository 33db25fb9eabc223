"""The evals as a user runs them: a whole report from a tiny model, and one line with exit code 2 for what can't be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from evals import console, distortion, generation, memory, perplexity, retrieval, streaming, throughput, tradeoff

ROOT = Path(__file__).parents[2]
EVALS = [
    module.main for module in (distortion, generation, memory, perplexity, retrieval, streaming, throughput, tradeoff)
]


def run(command, *arguments):
    """Runs an eval as its command line does, in this process; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        console.run(command, [str(argument) for argument in arguments])
    return ended.value.code


CACHES = ["dense", "int4", "window:window=40", "streaming:sinks=4,window=36+int8", "transformers:fp8"]


@pytest.fixture(scope="module")
def report(tiny_folder, tmp_path_factory):
    """What a user gets who types the command: the finished process and the folder of its report."""
    out = tmp_path_factory.mktemp("out") / "new" / "folder"
    options = ["--model", tiny_folder, "--prefill", 60, "--length", 120, "--windows", 2, "--decode-tokens", 100]
    options += ["--out", out, *(x for spec in CACHES for x in ("--cache", spec))]
    done = subprocess.run(
        [sys.executable, "-m", "evals.tradeoff", *map(str, options)],
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done, out


def test_a_run_prints_the_table_and_leaves_the_report(report):
    done, out = report
    assert sorted(path.name for path in out.iterdir()) == [
        "report.html",
        "report.json",
        "report.md",
        "tradeoff.png",
    ]
    for spec in ["transformers:dynamic", *CACHES]:
        assert spec in done.stdout
        assert f"| `{spec}` |" in (out / "report.md").read_text()
    assert "warning" not in done.stdout
    assert "Quality against memory: 100%" in done.stderr
    with Image.open(out / "tradeoff.png") as picture:
        assert picture.width > picture.height > 600


def test_the_report_tells_what_was_run_and_on_what(report):
    _, out = report
    told = json.loads((out / "report.json").read_text())
    assert set(told) >= {"schema", "eval", "command", "model", "protocol", "text", "seed", "machine", "date"}
    assert set(told["versions"]) == {"python", "torch", "transformers", "kvplug"}
    protocol = {"prefill": 60, "step": 16, "length": 120, "windows": 2, "bins": 8, "decode_tokens": 100}
    assert told["protocol"] == protocol
    assert [entry["spec"] for entry in told["results"]] == ["transformers:dynamic", *CACHES]
    for entry in told["results"]:
        assert set(entry) == {"spec", "quality", "by_position", "memory", "decode"}
        assert entry["decode"]["fault"] is None


def test_times_are_told_by_length_and_batch(tiny_folder, tmp_path):
    options = ["--model", tiny_folder, "--prompt", 40, "--tokens", 50, "--tokens", 100, "--batch", 1, "--batch", 3]
    options += ["--rounds", 2, "--steps", 1]
    assert run(throughput.main, *options, "--cache", "dense", "--out", tmp_path) == 0
    written = (tmp_path / "report.md").read_text()
    assert "ratio at 100 × 3" in written and "Time to first token" in written
    results = json.loads((tmp_path / "report.json").read_text())["results"]
    assert [(x["tokens"], x["batch"]) for x in results[1]["decode"]] == [(50, 1), (50, 3), (100, 1), (100, 3)]
    assert [(x["tokens"], x["batch"]) for x in results[1]["prefill"]] == [(40, 1), (40, 3)]


@pytest.mark.parametrize("command", EVALS, ids=lambda command: command.__module__)
@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--model", "no/such/model"], "error: --model: can't load 'no/such/model'"),
        (["--cache", "int44"], "error: --cache: 'int44'"),
        (["--device", "toaster"], "error: --device: 'toaster'"),
    ],
    ids=["model", "spec with a typo", "device"],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_two(tiny_folder, tmp_path, capfd, command, options, named):
    ends_in_one_line(capfd, command, named, "--model", tiny_folder, *options, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--dataset", "{tmp}/empty.txt"], "error: --dataset: '{tmp}/empty.txt' holds no text"),
        (["--dataset", "{tmp}/short.txt"], "error: --dataset: '{tmp}/short.txt' has 11 tokens, too short"),
        (["--length", "2049"], "error: --length: got 2,049, accepted is up to the model's 2,048 positions"),
        (["--step", "0"], "error: --step: got 0"),
    ],
    ids=["empty data set", "short text", "longer than the model", "no steps"],
)
def test_a_text_that_does_not_fit_is_one_line_and_exit_code_two(tiny_folder, tmp_path, capfd, options, named):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("eleven here")
    options = [option.format(tmp=tmp_path) for option in options]
    fixed = ["--model", tiny_folder, "--prefill", 60, "--length", 120, "--out", tmp_path / "out"]
    for command in (perplexity.main, tradeoff.main):
        ends_in_one_line(capfd, command, named.format(tmp=tmp_path), *fixed, *options)


def ends_in_one_line(capfd, command, named, *arguments):
    assert run(command, *arguments) == 2
    # Loading a model shows its own progress bar, which may have come before.
    lines = [line for line in capfd.readouterr().err.splitlines() if line and not line.startswith("Loading weights")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(named)


@pytest.mark.parametrize("options", [["--device", "auto"], ["--dtype", "bfloat16"]], ids=["spread", "in 16 bits"])
def test_where_and_in_what_a_model_runs(tiny_folder, tmp_path, options):
    fixed = ["--model", tiny_folder, "--prefill", 60, "--length", 120, "--decode-tokens", 50, "--out", tmp_path]
    assert run(tradeoff.main, *fixed, *options, "--cache", "dense", "--cache", "int4") == 0
    told = json.loads((tmp_path / "report.json").read_text())
    assert told["model"]["dtype"] == ("bfloat16" if "bfloat16" in options else "float32")
    full, dense, int4 = told["results"]
    assert full["memory"]["bits_held"] == (16 if "bfloat16" in options else 32)
    assert dense["decode"]["fault"] is None
    assert dense["quality"]["kl"] < 1e-4 < int4["quality"]["kl"]
