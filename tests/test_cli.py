"""The command `kvplug plan`: what it prints is what the planner says, and what a user got wrong ends in one line."""

import json
import re
import subprocess
import sys

import pytest
import torch

import kvplug
from kvplug import cli, compat
from kvplug.codecs import CODECS
from kvplug.shapes import SHAPES, shape
from kvplug.spec import one_of_each
from tests import models

GIB = 1 << 30


@pytest.fixture
def run(capsys):
    """Runs the command; returns exit code, stdout and stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def data(run):
    """Runs `plan … --json` and returns what it printed."""

    def call(*arguments):
        code, out, _ = run("plan", *arguments, "--json")
        assert code == 0
        return json.loads(out)

    return call


def test_the_table_shows_every_cache(run):
    code, out, err = run("plan", "llama-3.1-70b", "--memory", "80GiB")
    assert (code, err) == (0, "")
    assert all(spec in out for spec in one_of_each())
    line = next(line for line in out.splitlines() if line.startswith("dense"))
    assert re.split(r"\s{2,}", line.strip()) == [
        "dense", "327,680", "all", "2.50 GiB", "40.00 GiB", "262,144", "32", "2",
    ]  # fmt: skip
    assert re.search(r"window:window=1024 .* unlimited", out)
    assert "80GiB" in out


def test_the_json_is_the_plan(data):
    found = data("gemma-3-27b", "--cache", "int4", "--tokens", 5000, "--tokens", 700, "--batch", 3, "--memory", "24GB")
    assert (found["dtype"], found["batch"], found["memory_bytes"]) == ("bfloat16", 3, 24 * 10**9)
    assert found["layers"] == {"sliding": 52, "full": 10}
    (cache,) = found["caches"]
    assert [entry["tokens"] for entry in cache["lengths"]] == [700, 5000]
    for entry in cache["lengths"]:
        report = kvplug.plan(shape("gemma-3-27b"), "int4", entry["tokens"], batch=3)
        assert (
            entry["bytes"]
            == report.total
            == sum(
                entry["report"][part] for part in ("keys", "values", "scales", "residual", "tables", "scores", "spare")
            )
        )
        assert entry["requests_that_fit"] == 24 * 10**9 // report.total * 3
    fits = cache["tokens_that_fit"]
    assert not cache["unlimited"]
    totals = [kvplug.plan(shape("gemma-3-27b"), "int4", tokens, batch=3).total for tokens in (fits, fits + 1)]
    assert totals[0] <= 24 * 10**9 < totals[1]


def test_unlimited_is_told_apart_from_not_asked(data):
    (asked,) = data("llama-2-7b", "--cache", "window:window=64", "--memory", "1GiB")["caches"]
    (small,) = data("llama-2-7b", "--cache", "window:window=64", "--memory", "1MiB")["caches"]
    (not_asked,) = data("llama-2-7b", "--cache", "window:window=64")["caches"]
    assert (asked["tokens_that_fit"], asked["unlimited"]) == (None, True)
    assert (small["tokens_that_fit"], small["unlimited"]) == (0, False)
    assert "unlimited" not in not_asked


def test_caches_that_the_model_can_t_have_are_named_with_the_reason(data, run):
    found = data("falcon-7b")
    assert [cache["spec"] for cache in found["caches"]] == [*CODECS, "paged"]
    assert {entry["spec"] for entry in found["refused"]} == set(one_of_each()) - {*CODECS, "paged"}
    assert "Left out" in run("plan", "falcon-7b")[1]
    code, out, err = run("plan", "falcon-7b", "--cache", "window:window=64")
    assert (code, out) == (2, "")
    assert "attention code" in err


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_local_config(tmp_path, data, kind):
    config = models.tiny_qwen3_next().config
    config.save_pretrained(tmp_path)
    path = tmp_path if kind == "folder" else tmp_path / "config.json"
    found = data(path, "--cache", "int8", "--tokens", 100, "--dtype", "float16")
    assert found["layers"] == {"linear": 1, "full": 1}
    assert found["caches"][0]["lengths"][0]["bytes"] == kvplug.plan(config, "int8", 100, dtype=torch.float16).total
    assert data(path)["dtype"] == str(config.dtype or torch.bfloat16).removeprefix("torch.")


def test_the_dtype_can_be_chosen(data):
    sizes = [data("llama-2-7b", "--cache", "dense", "--dtype", d)["caches"][0]["bytes_per_token"] for d in cli.DTYPES]
    assert sizes == [2 * 524_288, 524_288, 524_288]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_the_one_that_a_cache_takes(name):
    config = shape(name)
    assert kvplug.plan(config, "dense", 1).total > 0
    assert compat.text_config(config).dtype == torch.bfloat16


MEMORY = {
    "80GiB": 80 * GIB,
    "80 gib": 80 * GIB,
    "24GB": 24 * 10**9,
    "2.36GiB": int(2.36 * GIB),
    "512MiB": GIB // 2,
    "1.5TB": 15 * 10**11,
    "1TiB": 1024 * GIB,
    "64KiB": 65_536,
    "64KB": 64_000,
    "1MB": 10**6,
}


@pytest.mark.parametrize(("text", "size"), MEMORY.items(), ids=MEMORY)
def test_sizes(text, size):
    assert cli.read_memory(text) == size


WRONG = {
    "no such file": (["./nowhere/config.json"], "nowhere.*built in: .*llama-3.1-8b"),
    "unknown name": (["some-model-that-is-nowhere"], "some-model.*built in: .*llama-3.1-8b"),
    "near a name": (["lama-3.1-8b"], "did you mean 'llama-3.1-8b'"),
    "typo in a spec": (["llama-2-7b", "--cache", "int5"], "int5.*int4"),
    "policy without its argument": (["llama-2-7b", "--cache", "window"], "window=512"),
    "memory without a unit": (["llama-2-7b", "--memory", "80"], "--memory='80'.*GiB"),
    "memory of nothing": (["llama-2-7b", "--memory", "0GiB"], "--memory='0GiB'.*above 0"),
    "memory below nothing": (["llama-2-7b", "--memory=-1GiB"], "--memory='-1GiB'"),
    "memory in words": (["llama-2-7b", "--memory", "much"], "--memory='much'"),
    "memory beyond all machines": (["llama-2-7b", "--memory", "9999999TiB"], "up to 1024TiB"),
    "unknown dtype": (["llama-2-7b", "--dtype", "int8"], "--dtype='int8'.*bfloat16"),
    "tokens in words": (["llama-2-7b", "--tokens", "many"], "--tokens"),
    "no tokens": (["llama-2-7b", "--tokens", "0"], "--tokens"),
    "no rows": (["llama-2-7b", "--batch", "0"], "--batch"),
    "unknown option": (["llama-2-7b", "--spec", "int4"], "--spec"),
    "no model": ([], "MODEL"),
    "plot that is no picture": (["llama-2-7b", "--plot", "a.txt"], "--plot='a.txt'.*png"),
    "plot nowhere": (["llama-2-7b", "--plot", "./nowhere/a.png"], "nowhere.*does not exist"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_what_a_user_got_wrong_is_one_line(run, monkeypatch, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert re.search(message, err)


CONFIGS = {
    "not json": ("{", "JSON"),
    "no type": ("{}", "model_type"),
    "unknown type": ('{"model_type": "nothing"}', "nothing"),
    "wrong field": ('{"model_type": "llama", "num_hidden_layers": "x"}', "num_hidden_layers"),
    "no attention": ('{"model_type": "mamba"}', "attention"),
    "no text": ('{"model_type": "vit"}', "vit.*text"),
    "sliding alone": ('{"model_type": "mistral", "sliding_window": 64}', "full.attention"),
}


@pytest.mark.parametrize(("text", "message"), CONFIGS.values(), ids=CONFIGS)
def test_a_config_that_can_t_be_planned_is_one_line(tmp_path, run, text, message):
    (tmp_path / "config.json").write_text(text)
    code, out, err = run("plan", tmp_path)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err)
    assert re.search(message, err)


def test_a_fault_of_ours_keeps_its_traceback(monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr(cli.Planner, "report", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", "llama-2-7b"])


@pytest.mark.parametrize("memory", [[], ["--memory", "80GiB"], ["--memory", "1MiB"]], ids=["alone", "memory", "tiny"])
def test_a_plot_is_a_picture(tmp_path, run, memory):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    code, _, err = run("plan", "gpt-oss-20b", "--plot", path, *memory)
    assert (code, err) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000


def test_without_matplotlib_a_plot_is_refused_before_any_work(run, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = run("plan", "llama-2-7b", "--plot", tmp_path / "a.png")
    assert (code, out) == (2, "")
    assert "matplotlib" in err


def test_it_runs_as_a_module_and_prints_json_alone():
    command = [sys.executable, "-m", "kvplug", "plan", "qwen3-next-80b-a3b", "--cache", "int4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["layers"] == {"linear": 36, "full": 12}
    assert done.stderr == ""
