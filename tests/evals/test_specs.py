"""Specs: kvplug's and transformers' own, each run with the attention that it needs."""

import pytest

from evals import specs
from evals.errors import InputError


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
