"""Needles in a context: where they lie, who gets to see them, and what counts as found; oracles use no kvplug."""

import json
import random
import string

import pytest
import torch
from PIL import Image

from evals import console, retrieval, runner, specs
from evals.errors import InputError
from evals.retrieval import Retrieval

# No digit stands in it: what the model copies from here can't be a key.
WORDS = ["".join(random.Random(i).choices(string.ascii_lowercase, k=2 + i % 7)) for i in range(600)]
TEXT = " ".join(WORDS)


@pytest.fixture
def work(tiny):
    """Makes an eval over the text above on the tiny model, where a token is a byte."""

    tokens = tiny.tokenizer(TEXT, add_special_tokens=False).input_ids

    def make(*caches, **options):
        options = {"lengths": [300], "depths": [0.25, 0.75], "samples": 1, "tokens": tokens, **options}
        return Retrieval(tiny, list(caches), **options)

    return make


def one_layer(loaded):
    """Keys and values of a one-layer model hold their own token alone: what is dropped has left no trace elsewhere."""
    loaded.model.model.layers = loaded.model.model.layers[:1]
    loaded.model.config.num_hidden_layers = 1
    return loaded


def piece_of(made, spec, **told):
    found = [piece for piece in made.pieces() if piece.of[0] == spec]
    names = ("needles", "length", "depth", "sample")
    return next(p for p in found if all(p.of[1 + names.index(name)] == value for name, value in told.items()))


def measured(made, piece):
    return made.measure(piece, lambda tokens: None)


# Where it lies


@pytest.mark.parametrize("depth", [0.2, 0.35, 0.5, 0.85])
def test_the_needle_lies_at_the_stated_depth(work, tiny, depth):
    case = work(depths=[depth]).case(1, 400, depth, 0)
    assert len(case.ids) == 400
    context = tiny.tokenizer.decode(case.ids)
    key = case.facts[0].key
    needle = f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
    before, after = context.split(needle)
    assert before + after == TEXT[case.start : case.start + 400 - len(needle)]
    # A token is a byte here; half of one is lost to rounding at either end.
    assert abs(len(before) + len(needle) / 2 - depth * 400) <= 1
    assert (case.facts[0].start, case.facts[0].stop) == (len(before), len(before) + len(needle))


@pytest.mark.parametrize("depth", [0, 0.01, 0.99, 1])
def test_a_needle_that_would_stick_out_is_moved_inside(work, tiny, depth):
    case = work().case(1, 300, depth, 0)
    context = tiny.tokenizer.decode(case.ids)
    assert len(case.ids) == 300
    fits = context.startswith if depth < 0.5 else context.endswith
    assert fits(f"\n\nThe pass key is {case.facts[0].key}. Remember it. {case.facts[0].key} is the pass key.\n\n")


@pytest.mark.parametrize("needles", [2, 4])
def test_several_needles_are_spread_evenly_and_differ(work, tiny, needles):
    case = work(needles=[needles]).case(needles, 900, None, 0)
    context = tiny.tokenizer.decode(case.ids)
    assert len(case.ids) == 900
    assert len({fact.key for fact in case.facts}) == len({fact.name for fact in case.facts}) == needles
    for i, fact in enumerate(case.facts):
        name, key = fact.name, fact.key
        written = f"\n\nThe pass key for {name} is {key}. Remember it. {key} is the pass key for {name}.\n\n"
        assert context.count(written) == 1
        middle = context.index(written) + len(written) / 2
        assert abs(middle - 900 * (2 * i + 1) / (2 * needles)) <= 1
        assert fact.question.count(fact.name) == 2
        assert fact.key not in fact.question


def test_the_opening_token_stays_in_front(work):
    case = work(opening=[7]).case(1, 300, 0, 0)
    assert case.ids[0] == 7
    assert len(case.ids) == 300
    assert case.facts[0].start == 1


def test_no_key_stands_in_the_text_already(work, tiny):
    # All five-digit numbers but those from 99,000 on: one of these must be drawn.
    everything = " ".join(str(number) for number in range(10_000, 99_000))
    made = work(tokens=tiny.tokenizer(everything, add_special_tokens=False).input_ids)
    assert int(made.case(1, len(made.tokens), 0.5, 0).facts[0].key) >= 99_000


def test_a_case_depends_on_its_own_numbers_and_the_seed_alone(work):
    one = work("dense", seed=3).case(1, 300, 0.75, 1)
    assert one == work("int8", seed=3, lengths=[300, 400], depths=[0.75], samples=5).case(1, 300, 0.75, 1)
    others = [
        work(seed=4).case(1, 300, 0.75, 1),
        work(seed=3).case(1, 300, 0.75, 2),
        work(seed=3).case(1, 300, 0.25, 1),
        work(seed=3).case(1, 301, 0.75, 1),
    ]
    for other in others:
        assert other.facts[0].key != one.facts[0].key
        assert other.start != one.start


# Who sees it


def plain(model, ids, count):
    """What `generate` writes after `ids` by itself."""
    fed = torch.tensor([ids])
    out = model.generate(input_ids=fed, attention_mask=torch.ones_like(fed), do_sample=False, max_new_tokens=count)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("needles", [1, 3])
@pytest.mark.parametrize("spec", [specs.REFERENCE, "transformers:static", "dense", "window:window=500"])
def test_a_cache_that_keeps_everything_answers_as_plain_generate_does(work, tiny, spec, needles):
    made = work(spec, needles=[needles], lengths=[400])
    case = made.case(needles, 400, 0.25 if needles == 1 else None, 0)
    record = measured(made, piece_of(made, spec))
    assert [one["wanted"] for one in record["asked"]] == [fact.key for fact in case.facts]
    for fact, one in zip(case.facts, record["asked"], strict=True):
        name = f" for {fact.name}" if fact.name else ""
        question = tiny.tokenizer(f"\n\nWhat is the pass key{name}? The pass key{name} is").input_ids
        # A space, five digits, and three tokens to see whether the number goes on.
        wanted = tiny.tokenizer.decode(plain(tiny.model, case.ids + question, 9))
        assert one["after"] == one["before"] == wanted


def windowed(model, parts, window, count):
    """Greedy tokens of a one-layer model that sees the last `window` tokens from before each forward; no cache."""
    seen, found = [], []
    with torch.no_grad():
        for part in parts:
            seen = seen[-window:] + part
            logits = model(torch.tensor([seen]), use_cache=False).logits[0, -1]
        for _ in range(count):
            found.append(logits.argmax().item())
            seen = seen[-window:] + found[-1:]
            logits = model(torch.tensor([seen]), use_cache=False).logits[0, -1]
    return found


def test_a_window_answers_from_what_it_keeps(work, tiny):
    one_layer(tiny)
    made = work("window:window=60", samples=3)
    differ = 0
    for depth in made.depths:
        for sample in range(3):
            case = made.case(1, 300, depth, sample)
            (found,) = measured(made, piece_of(made, "window:window=60", depth=depth, sample=sample))["asked"]
            question = tiny.tokenizer("\n\nWhat is the pass key? The pass key is").input_ids
            after = tiny.tokenizer.decode(windowed(tiny.model, [case.ids, question], 60, 9))
            before = tiny.tokenizer.decode(windowed(tiny.model, [case.ids + question], 60, 9))
            assert (found["after"], found["before"]) == (after, before)
            # The prompt's own attention is exact, so this order begins as the full cache would.
            assert before[0] == tiny.tokenizer.decode(plain(tiny.model, case.ids + question, 1))[0]
            differ += after != before
    assert differ


def test_a_needle_outside_the_window_has_no_say_in_the_answer(work, tiny):
    one_layer(tiny)
    made = work("window:window=60")
    told = {spec: set() for spec in made.order}
    case = made.case(1, 300, 0.25, 0)
    question = made.encode(case.facts[0].question)
    for key in ("11111", "52963", "97408"):
        ids = made.encode(tiny.tokenizer.decode(case.ids).replace(case.facts[0].key, key))
        for spec in made.order:
            told[spec].add(made.answer(spec, [ids, question], 40, 400)[0])
    assert len(told["window:window=60"]) == 1
    assert len(told[specs.REFERENCE]) > 1


@pytest.mark.parametrize("listed", [False, True], ids=["one", "a list"])
def test_an_answer_ends_where_the_model_ends_it(work, tiny, listed):
    made = work()
    case = made.case(1, 300, 0.25, 0)
    parts = [case.ids, made.encode(case.facts[0].question)]
    tokens = plain(tiny.model, parts[0] + parts[1], 9)
    last = tokens[4]
    tiny.model.generation_config.eos_token_id = [last] if listed else last
    found, memory = made.answer(specs.REFERENCE, parts, 9, 400)
    assert found == tiny.tokenizer.decode(tokens[: tokens.index(last)])
    assert memory["tokens_seen"] == sum(map(len, parts))


# What counts


def test_the_tiny_model_finds_nothing(work):
    made = work("window:window=60")
    for entry in made.results({piece.key: measured(made, piece) for piece in made.pieces()}):
        assert entry["recall"]["after"]["recall"] == entry["recall"]["before"]["recall"] == 0


def answered(made, answers):
    """Records of a run whose answers are made up: `answers(spec, fact, others)` gives those to both orders."""
    records = {}
    for piece in made.pieces():
        spec, _, length, *_ = piece.of
        case = made.case(*piece.of[1:])
        asked = []
        for fact in case.facts:
            after, before = answers(spec, fact, [other.key for other in case.facts if other is not fact])
            told = {"name": fact.name, "depth": fact.depth, "middle": fact.depth, "wanted": fact.key}
            asked.append({**told, "after": after, "before": before})
        held = length * (8 if spec == specs.REFERENCE else 2)
        memory = {"held_bytes": held, "elements": length, "drops_tokens": False, "report": None, "report_agrees": None}
        records[piece.key] = json.loads(json.dumps({"start": case.start, "asked": asked, "memory": memory}))
    return records


def test_a_wrong_key_never_counts(work):
    made = work("dense", needles=[3], lengths=[600], samples=2)

    def answers(spec, fact, others):
        # The other needles' keys, in both orders, with the right one only as a part of a longer number.
        return f" {others[0]}, {fact.key}1", f" 9{fact.key} {others[1]}."

    for entry in made.results(answered(made, answers)):
        assert entry["recall"]["after"]["recall"] == entry["recall"]["before"]["recall"] == 0
        assert entry["recall"]["after"]["n"] == 6


def test_each_cell_counts_its_own_questions(work):
    made = work("dense", needles=[1, 2], lengths=[300, 500], samples=2)

    def answers(spec, fact, others):
        shallow = f" {fact.key}." if fact.depth < 0.5 else " 00000."
        return shallow, f" {fact.key}. And" if spec == specs.REFERENCE else ""

    full, dense = made.results(answered(made, answers))
    assert (full["spec"], dense["spec"]) == (specs.REFERENCE, "dense")
    # 2 lengths × 2 depths × 2 samples of one needle, 2 lengths × 2 samples of two.
    assert dense["recall"]["after"]["n"] == len(dense["asked"]) == 16
    assert dense["recall"]["after"]["recall"] == 0.5
    assert (full["recall"]["before"]["recall"], dense["recall"]["before"]["recall"]) == (1, 0)
    assert [(p["needles"], p["length"], p["after"]["n"]) for p in dense["by_length"]] == [
        (1, 300, 4), (1, 500, 4), (2, 300, 4), (2, 500, 4),
    ]  # fmt: skip
    cells = {(c["needles"], c["length"], c["depth"]): c["after"] for c in dense["cells"]}
    assert len(cells) == 8
    for (_, _, depth), found in cells.items():
        assert (found["recall"], found["n"]) == (float(depth < 0.5), 2)
    assert full["memory"] == full["by_length"][1]["memory"]
    # By hand: 500 elements, 1,000 of 4,000 bytes held.
    assert (dense["memory"]["bits_held"], dense["memory"]["of_full"]) == (16, 0.25)
    assert dense["by_length"][0]["memory"]["held_bytes"] == 600


def test_memory_is_that_of_context_and_question(work, tiny):
    made = work("dense", "window:window=60", lengths=[200, 300], depths=[0.5])
    entries = {e["spec"]: e for e in made.results({p.key: measured(made, p) for p in made.pieces()})}
    tokens = 300 + len("\n\nWhat is the pass key? The pass key is")
    # Two layers of keys and values, two heads of 16 floats.
    assert entries[specs.REFERENCE]["memory"]["held_bytes"] == tokens * 2 * 2 * 2 * 16 * 4
    assert entries[specs.REFERENCE]["memory"]["bits_held"] == 32
    assert entries["window:window=60"]["memory"]["drops_tokens"]
    assert entries["window:window=60"]["memory"]["of_full"] < 1


# A whole run


def without_place(result):
    """A result as far as it depends on the seed alone."""
    return json.dumps(result["results"], sort_keys=True)


def test_a_stopped_run_goes_on_to_the_same_result(work, tmp_path, monkeypatch):
    def fresh(**options):
        return work("window:window=60", needles=[1, 2], depths=[0.5], **options)

    whole = runner.run(fresh(), tmp_path / "whole")
    real, count = Retrieval.measure, 0

    def stopping(self, piece, tick):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(self, piece, tick)

    monkeypatch.setattr(Retrieval, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        runner.run(fresh(), tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "report.json").exists()
    resumed = runner.run(fresh(), tmp_path / "stopped")
    assert count == 1 + len(fresh().pieces())
    assert without_place(resumed) == without_place(whole)
    assert without_place(runner.run(fresh(), tmp_path / "again")) == without_place(whole)
    assert without_place(runner.run(fresh(seed=1), tmp_path / "other")) != without_place(whole)


def run(*arguments):
    """Runs the command line in this process; returns the exit code."""
    with pytest.raises(SystemExit) as ended:
        console.run(retrieval.main, [str(argument) for argument in arguments])
    return ended.value.code


def test_the_report_has_both_orders_and_every_depth(tiny_folder, tmp_path, capfd):
    (tmp_path / "text.txt").write_text(TEXT)
    options = ["--model", tiny_folder, "--dataset", tmp_path / "text.txt", "--cache", "window:window=60"]
    options += ["--length", 250, "--length", 300, "--needles", 2, "--needles", 1, "--depth", 0.5, "--samples", 1]
    assert run(*options, "--out", tmp_path / "out") == 0
    told = json.loads((tmp_path / "out" / "report.json").read_text())
    assert told["protocol"] == {"lengths": [250, 300], "depths": [0.5], "needles": [1, 2], "samples": 1}
    assert [entry["spec"] for entry in told["results"]] == [specs.REFERENCE, "window:window=60"]
    assert {"wanted", "after", "before", "middle", "start"} <= set(told["results"][1]["asked"][0])
    written = (tmp_path / "out" / "report.md").read_text()
    assert "recall, question after | question before" in written
    assert "measures far less" in written
    for needles, length, depths in [("1 needle", 250, "0.5"), ("2 needles", 300, "0.25 | 0.75")]:
        assert f"## Recall by depth, {needles} in {length} tokens" in written
        assert f"at depth | {depths} |" in written
    assert "Needles found" in capfd.readouterr().out
    with Image.open(tmp_path / "out" / "retrieval.png") as picture:
        assert picture.width > 600 < picture.height


@pytest.mark.parametrize("caches", [1, 6, 9])
@pytest.mark.parametrize("lengths", [[900], [900, 1800, 3600]], ids=["one length", "three lengths"])
def test_the_picture_has_a_panel_for_each_cache_and_number_of_needles(work, tmp_path, monkeypatch, caches, lengths):
    made = work(lengths=lengths, needles=[1, 4], depths=retrieval.DEPTHS)
    one = {"after": {"recall": 0.5}}
    cells = [
        {"needles": n, "length": length, "depth": depth, **one}
        for n, depths in ((1, made.depths), (4, [0.125, 0.375, 0.625, 0.875]))
        for length in lengths
        for depth in depths
    ]
    entries = [{"spec": f"window:window={i}", "cells": cells} for i in range(caches)]
    result = {"model": {"name": "x/tiny"}, "protocol": made.protocol(), "results": entries}
    drawn = []
    monkeypatch.setattr(retrieval.figure, "save", lambda figure, path: drawn.append(figure))
    made.draw(result, tmp_path / "x.png")
    panels = [axes for axes in drawn[0].axes if axes.get_title()]
    assert len(panels) == 2 * caches
    assert {len(axes.texts) for axes in panels} == {10 * len(lengths), 4 * len(lengths)}
    assert {text.get_text() for axes in panels for text in axes.texts} == {"0.50"}
    retrieval.figure.plt.close(drawn[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--length", "2010"], "--length: got 2,010, accepted is up to 2,000: the model has 2,048 positions"),
        (["--length", "60"], "--length: got 60, accepted is 64 or more for 1 needle"),
        (["--needles", "4", "--length", "200"], "--length: got 200, accepted is "),
        (["--depth", "1.5"], "--depth: got 1.5, accepted is 0"),
        (["--depth", "-0.1"], "--depth: got -0.1, accepted is 0"),
        (["--samples", "0"], "--samples: got 0, accepted is 1 or more"),
        (["--needles", "0"], "--needles: got 0, accepted is 1 to 16"),
        (["--needles", "17"], "--needles: got 17, accepted is 1 to 16"),
        (["--dataset", "{tmp}/short.txt"], "--length: got 900, accepted is up to the 11 tokens of the text"),
        (["--cache", "int44"], "--cache: 'int44'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line_and_exit_code_two(tiny_folder, tmp_path, capfd, options, named):
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "short.txt").write_text("eleven here")
    options = [option.format(tmp=tmp_path) for option in options]
    fixed = ["--model", tiny_folder, "--dataset", tmp_path / "text.txt", "--out", tmp_path / "out"]
    assert run(*fixed, *options) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line and not line.startswith("Loading weights")]
    assert len(lines) == 1, lines
    assert lines[0].startswith(f"error: {named}")
    assert not (tmp_path / "out").exists()


def test_the_shortest_context_that_is_accepted_works(work):
    with pytest.raises(InputError) as refused:
        work(lengths=[60]).check()
    least = int(str(refused.value).split("accepted is ")[1].split()[0])
    made = work(lengths=[least], depths=[0, 0.5, 1])
    made.check()
    assert {len(made.case(1, least, depth, 0).ids) for depth in made.depths} == {least}
