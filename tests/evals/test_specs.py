"""Specs: kvplug's, transformers' own, and contexts that are compressed, each run with the attention that it needs."""

import pytest
import torch

from evals import console, generation, memory, specs, streaming, throughput, why_cache
from evals.errors import InputError
from evals.perplexity import Perplexity
from evals.retrieval import Retrieval
from evals.teacher import Protocol


@pytest.mark.parametrize("spec", ["dense", "int4", "streaming:sinks=2,window=6+int8", "transformers:dynamic"])
def test_a_spec_becomes_a_cache(tiny, spec):
    assert specs.build(spec, tiny.model, capacity=8).get_seq_length() == 0


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("int5", "int4"),
        ("window:windw=4", "window"),
        ("window:window=-1", "window"),
        ("transformers:int4", "dynamic, static, fp8"),
        ("", "dense"),
    ],
    ids=["name", "argument", "value", "transformers", "empty"],
)
def test_a_typo_names_what_is_accepted_in_one_line(tiny, spec, named):
    with pytest.raises(InputError, match=named) as raised:
        specs.check([spec], tiny.model)
    assert str(raised.value).startswith("--cache: ")
    assert "\n" not in str(raised.value)


def test_a_missing_backend_is_named(tiny, monkeypatch):
    def missing(config, capacity):
        raise ImportError("No module named 'optimum'")

    monkeypatch.setitem(specs.BASELINES, "quanto4", missing)
    with pytest.raises(InputError, match="needs a package that is missing: No module named 'optimum'"):
        specs.build("transformers:quanto4", tiny.model, capacity=8)


def test_transformers_caches_never_run_through_kvplug(tiny):
    config = tiny.model.config
    before = config._attn_implementation
    with specs.routed("int4", tiny.model):
        specs.build("int4", tiny.model, capacity=8)
        assert config._attn_implementation == "kvplug"
    assert config._attn_implementation == before
    with specs.routed("transformers:dynamic", tiny.model):
        assert config._attn_implementation == before


def test_checking_specs_leaves_the_model_as_it_was(tiny):
    before = tiny.model.config._attn_implementation
    assert specs.check(["int4", "dense", "int4"], tiny.model) == ["int4", "dense"]
    assert tiny.model.config._attn_implementation == before


# A context that is compressed before it is asked


@pytest.mark.parametrize(
    ("spec", "kept"),
    [("kvzip:budget=0.25", 10), ("kvzip:budget=7", 7), ("kvzip:budget=1.0", 40), ("kvzip:budget=0.5+int4", 20)],
)
def test_a_context_is_compressed(tiny, spec, kept):
    with specs.routed(spec, tiny.model):
        cache = specs.build(spec, tiny.model, capacity=60, context=torch.randint(0, 256, (1, 40)))
        assert (cache.memory().tokens_seen, cache.memory().tokens_kept) == (40, kept)
        assert (cache.memory().scales > 0) == ("int4" in spec)


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        ("kvzip:budget=lots", "lots.*accepted"),
        ("kvzip:budget=", "accepted"),
        ("kvzip:budget=1.5", "budget=1.5.*up to 1.0"),
        ("kvzip:budget=0", "budget=0 .*at least 1"),
        ("kvzip:budget=0.25,sinks=2", "sinks.*accepted"),
        ("kvzip:budget=0.25+int5", "int5.*int4"),
        ("kvzip:budget=0.25+window:window=8", "window.*accepted"),
        ("kvzip:budget=0.25+int4:residual=32", "residual.*accepted"),
        ("kvzip", "kvzip.*one of"),
        ("kvzip:share=0.25", "kvzip.*one of"),
    ],
)
def test_a_typo_in_what_is_made_of_a_context(tiny, spec, named):
    with pytest.raises(InputError, match=named) as raised:
        specs.check([spec], tiny.model, contexts=True)
    assert str(raised.value).startswith(f"--cache: '{spec}'")
    assert "\n" not in str(raised.value)


MADE_OF_A_CONTEXT = "is made of a context; perplexity, tradeoff and retrieval accept it"


@pytest.mark.parametrize("work", [generation, memory, streaming, throughput, why_cache], ids=lambda work: work.__name__)
def test_other_evals_refuse_what_is_made_of_a_context(tiny_folder, tmp_path, capfd, work):
    given = ["--model", str(tiny_folder), "--cache", "kvzip:budget=0.25", "--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as ended:
        console.run(work.main, given)
    assert ended.value.code == 2
    assert f"error: --cache: 'kvzip:budget=0.25' {MADE_OF_A_CONTEXT}" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


def test_perplexity_reads_on_behind_a_compressed_context(tiny):
    caches = ["kvzip:budget=1.0", "kvzip:budget=0.25", "kvzip:budget=0.25+int8"]
    ids, steps = torch.randint(0, 256, (1, 120)), Protocol(prefill=80, step=8, length=120)
    work = Perplexity(tiny, caches, ids=ids, steps=steps, bins=2)
    records = {piece.key: work.measure(piece, lambda tokens: None) for piece in work.pieces()}
    full, whole, part, coded = work.results(records)
    assert whole["quality"]["kl"] < 1e-6 < part["quality"]["kl"]
    assert whole["quality"]["perplexity"] == pytest.approx(full["quality"]["perplexity"], rel=1e-4)
    assert all(entry["memory"]["report_agrees"] for entry in (whole, part, coded))
    held = [entry["memory"]["held_bytes"] for entry in (whole, part, coded)]
    assert held == sorted(held, reverse=True)
    assert part["memory"]["drops_tokens"]
    assert part["memory"]["tokens_seen"] == 119


def test_needles_are_asked_for_in_a_compressed_context(tiny):
    tokens = torch.randint(97, 123, (600,)).tolist()
    caches = ["kvzip:budget=1.0", "kvzip:budget=0.25"]
    work = Retrieval(tiny, caches, lengths=[200], depths=[0.5], samples=1, tokens=tokens)
    records = {piece.key: work.measure(piece, lambda tokens: None) for piece in work.pieces()}
    full, whole, part = work.results(records)
    for order in ("after", "before"):
        assert whole["asked"][0][order] == full["asked"][0][order]
    held = part["memory"]
    assert held["report_agrees"]
    # A quarter of 199 tokens, the last of the context, and the question; without the room that is open for more.
    assert held["held_bytes"] - held["report"]["spare"] < 0.5 * full["memory"]["held_bytes"]
