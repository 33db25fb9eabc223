"""Free writing with each cache: against a plain `generate`, a window cut by hand, and an edit distance by hand."""

import itertools
import json
import random

import pytest
import torch
from PIL import Image

from evals import console, generation, runner, specs
from evals.generation import Generation

PROMPTS = torch.randint(0, 256, (3, 80), generator=torch.Generator().manual_seed(5))
WINDOW = "window:window=20"


@pytest.fixture
def work(tiny):
    def make(*caches, **options):
        return Generation(tiny, list(caches), **{"ids": PROMPTS, "new_tokens": 12, **options})

    return make


def measured(made):
    return {piece.key: made.measure(piece, lambda tokens: None) for piece in made.pieces()}


def without_cache(model, prompt, count, window=None):
    """Greedy tokens by whole forwards; with a window, what came before the last forward is cut to its end."""
    seen, found = prompt.tolist(), []
    with torch.no_grad():
        for _ in range(count):
            found.append(model(torch.tensor([seen]), use_cache=False).logits[0, -1].argmax().item())
            seen = (seen[-window:] if window else seen) + found[-1:]
    return found


@pytest.mark.parametrize("spec", [specs.REFERENCE, "transformers:static", "dense", "window:window=92"])
def test_a_cache_that_keeps_everything_writes_what_whole_forwards_write(work, tiny, spec):
    made = work(spec)
    entry = made.results(measured(made))[-1]
    assert entry["spec"] == spec
    assert [text["tokens"] for text in entry["texts"]] == [without_cache(tiny.model, ids, 12) for ids in PROMPTS]
    assert [text["text"] for text in entry["texts"]] == [tiny.tokenizer.decode(t["tokens"]) for t in entry["texts"]]
    assert entry["agreement"] == {"identical": 1, "first_divergence": 12, "edit_distance": 0, "n": 3}
    assert entry["following"] == [1] * 13


def test_a_window_writes_from_what_it_keeps(work, tiny):
    # Keys and values of one layer hold their own token alone: what is dropped has left no trace elsewhere.
    tiny.model.model.layers = tiny.model.model.layers[:1]
    tiny.model.config.num_hidden_layers = 1
    made = work(WINDOW)
    full, window = made.results(measured(made))
    wanted = [without_cache(tiny.model, ids, 12, window=20) for ids in PROMPTS]
    assert [text["tokens"] for text in window["texts"]] == wanted
    assert [text["tokens"] for text in full["texts"]] != wanted
    assert window["agreement"]["identical"] < 1
    # The first token comes from the prompt's own attention, which is exact.
    assert window["following"][:2] == [1, 1]
    assert window["memory"]["drops_tokens"]
    assert window["memory"]["of_full"] < 1


def test_a_text_never_ends_early(work, tiny):
    last = without_cache(tiny.model, PROMPTS[0], 3)[2]
    tiny.model.generation_config.eos_token_id = last
    made = work("dense")
    for entry in made.results(measured(made)):
        assert [len(text["tokens"]) for text in entry["texts"]] == [12] * 3
        assert all(last not in text["tokens"] for text in entry["texts"])


def test_memory_is_that_of_all_tokens_that_were_fed(work):
    made = work("dense")
    full, _ = made.results(measured(made))
    # 80 of the prompt and 11 of 12 written; two layers of keys and values, two heads of 16 floats.
    assert full["memory"]["held_bytes"] == 91 * 2 * 2 * 2 * 16 * 4
    assert full["memory"]["tokens_seen"] == 91
    assert (full["memory"]["bits_held"], full["memory"]["of_full"]) == (32, 1)


def edits(one, other):
    """Insertions, deletions and substitutions between two sequences, by the textbook's table."""
    table = {(i, 0): i for i in range(len(one) + 1)} | {(0, j): j for j in range(len(other) + 1)}
    for i, j in itertools.product(range(1, len(one) + 1), range(1, len(other) + 1)):
        same = table[i - 1, j - 1] + (one[i - 1] != other[j - 1])
        table[i, j] = min(table[i - 1, j] + 1, table[i, j - 1] + 1, same)
    return table[len(one), len(other)]


def made_up(made, texts):
    """Records of a run whose tokens are made up, by spec."""
    memory = {"held_bytes": 8, "elements": 2}
    return {
        piece.key: {"tokens": texts[piece.of[0]][piece.of[1]], "text": "", "memory": dict(memory)}
        for piece in made.pieces()
    }


@pytest.mark.parametrize("seed", range(5))
def test_agreement_is_counted_as_by_hand(work, seed):
    draw = random.Random(seed)
    full = [[draw.randrange(4) for _ in range(12)] for _ in range(3)]
    kept = [draw.randrange(1, 12) for _ in full]
    # Parts from the full text at a known place, and by another token there.
    other = [
        [*text[:n], (text[n] + 1) % 4, *(draw.randrange(4) for _ in text[n + 1 :])]
        for text, n in zip(full, kept, strict=True)
    ]
    other[0], kept[0] = list(full[0]), 12
    made = work("dense")
    _, entry = made.results(made_up(made, {specs.REFERENCE: full, "dense": other}))
    agreement = entry["agreement"]
    assert agreement["identical"] == pytest.approx(1 / 3)
    assert agreement["first_divergence"] == sorted(kept)[1]
    distances = [edits(one, two) / 12 for one, two in zip(full, other, strict=True)]
    assert agreement["edit_distance"] == pytest.approx(sum(distances) / 3)
    assert entry["following"] == pytest.approx([sum(n <= k for k in kept) / 3 for n in range(13)])


# A whole run


def test_a_stopped_run_goes_on_to_the_same_result(work, tmp_path, monkeypatch):
    whole = runner.run(work("int4", WINDOW), tmp_path / "whole")
    real, count = Generation.measure, 0

    def stopping(self, piece, tick):
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return real(self, piece, tick)

    monkeypatch.setattr(Generation, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        runner.run(work("int4", WINDOW), tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "report.json").exists()
    resumed = runner.run(work("int4", WINDOW), tmp_path / "stopped")
    assert count == 1 + len(work("int4", WINDOW).pieces())
    assert resumed["results"] == whole["results"]
    assert runner.run(work("int4", WINDOW), tmp_path / "again")["results"] == whole["results"]


def test_the_order_of_caches_changes_nothing(work):
    one, other = work("int4", WINDOW), work(WINDOW, "int4")
    found = [{e["spec"]: e for e in made.results(measured(made))} for made in (one, other)]
    assert found[0] == found[1]


def run(*arguments):
    """Runs the command line in this process; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        console.run(generation.main, [str(argument) for argument in arguments])
    return ended.value.code


def test_the_report_says_what_a_flipped_token_does(tiny_folder, tmp_path, capfd):
    (tmp_path / "text.txt").write_text("all work and no play " * 40)
    options = ["--model", tiny_folder, "--dataset", tmp_path / "text.txt", "--cache", "dense", "--cache", WINDOW]
    options += ["--prompts", 2, "--prompt-tokens", 50, "--new-tokens", 8, "--out", tmp_path / "out"]
    assert run(*options) == 0
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["protocol"] == {"prompts": 2, "prompt_tokens": 50, "new_tokens": 8}
    assert [entry["spec"] for entry in told["results"]] == [specs.REFERENCE, "dense", WINDOW]
    for entry in told["results"]:
        assert [len(text["tokens"]) for text in entry["texts"]] == [8, 8]
    written = (tmp_path / "out" / "report.md").read_text()
    assert "| `dense` | 1.00 | 8 | 0.000 | 2 |" in written
    assert "not how bad its own became" in written
    assert WINDOW in capfd.readouterr().out
    with Image.open(tmp_path / "out" / "generation.png") as picture:
        assert picture.width > 1000 > picture.height > 600


def test_the_exact_cache_is_among_the_default_ones():
    assert "dense" in generation.DEFAULT_CACHES


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--prompts", "0"], "--prompts: got 0, accepted is 1 or more"),
        (["--prompt-tokens", "0"], "--prompt-tokens: got 0, accepted is 1 or more"),
        (["--new-tokens", "0"], "--new-tokens: got 0, accepted is 1 or more"),
        (["--prompt-tokens", "2000"], "--prompt-tokens: got 2,000, accepted is up to 1,984"),
        (["--new-tokens", "2048"], "--new-tokens: got 2,048, accepted is up to 2,047"),
        (["--cache", "int44"], "--cache: 'int44'"),
        (["--prompts", "9"], "--dataset: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_exit_code_two(tiny_folder, tmp_path, capfd, options, named):
    (tmp_path / "text.txt").write_text("all work and no play " * 120)
    fixed = ["--model", tiny_folder, "--dataset", tmp_path / "text.txt", "--out", tmp_path / "out"]
    assert run(*fixed, *options) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line and not line.startswith("Loading weights")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: {named}")
    assert not (tmp_path / "out").exists()
