"""Caches from strings: each spec builds what the recipe of that name builds, in any order, with the same defaults."""

import pytest
import torch

import kvplug
from tests import models
from tests.oracles import feed

SAME = {
    "dense": lambda m: kvplug.DenseCache(m),
    "fp8": lambda m: kvplug.QuantCache(m, dtype="fp8"),
    "int8": lambda m: kvplug.QuantCache(m, dtype="int8"),
    "int4": lambda m: kvplug.QuantCache(m),
    "quant": lambda m: kvplug.QuantCache(m),
    "quant:dtype=int8": lambda m: kvplug.QuantCache(m, dtype="int8"),
    "quant:keys=int8,values=int4": lambda m: kvplug.QuantCache(m, keys="int8", values="int4"),
    "quant:values=fp8": lambda m: kvplug.QuantCache(m, values="fp8"),
    "quant:keys=dense,values=int4": lambda m: kvplug.QuantCache(m, keys="dense", values="int4"),
    "window:window=8": lambda m: kvplug.WindowCache(m, 8),
    "window:window=8+int4": lambda m: kvplug.WindowCache(m, 8, codec="int4"),
    "int4+window:window=8": lambda m: kvplug.WindowCache(m, 8, codec="int4"),
    "streaming:sinks=2,window=6": lambda m: kvplug.StreamingLLMCache(m, 2, 6),
    "streaming:window=6,sinks=2+fp8": lambda m: kvplug.StreamingLLMCache(m, 2, 6, codec="fp8"),
    "streaming:sinks=2,window=6,positions=original": lambda m: kvplug.StreamingLLMCache(m, 2, 6, positions="original"),
    " streaming:sinks = 2 , window = 6 + int8 ": lambda m: kvplug.StreamingLLMCache(m, 2, 6, codec="int8"),
    "streaming:window=8,sinks=0": lambda m: kvplug.StreamingLLMCache(m, 0, 8),
}


@pytest.mark.parametrize(("spec", "make"), SAME.items(), ids=[spec.strip() for spec in SAME])
def test_a_spec_is_its_recipe(model, spec, make):
    ids, chunks = models.tokens(2, 24), [12, 1, 1, 10]
    built, named = kvplug.from_spec(spec, model), make(model)
    assert isinstance(built, kvplug.KVCache)
    assert torch.equal(feed(model, built, ids, chunks), feed(model, named, ids, chunks))
    assert built.memory() == named.memory()
    assert [repr(layer) for layer in built.layers] == [repr(layer) for layer in named.layers]


def test_specs_differ(model):
    """Each of them gives another answer, so none of them is silently another."""
    ids, chunks = models.tokens(1, 24), [12, 1, 1, 10]
    low = ":group_size=4,residual=2,sinks=1"
    specs = f"dense fp8 int8 int4{low} int3{low} quant{low},keys=int8,scheme=channel quant{low},values=int8 "
    specs += f"quant{low},scheme=channel quant{low},scheme=lloyd_max quant:group_size=4,residual=3,sinks=1 "
    specs += "window:window=8 window:window=8+int4 "
    specs += "streaming:sinks=2,window=6 streaming:sinks=2,window=6,positions=original"
    seen = {}
    for spec in specs.split():
        seen[spec] = feed(model, kvplug.from_spec(spec, model), ids, chunks)[0, -1]
    for spec, logits in seen.items():
        assert not any(torch.equal(logits, other) for name, other in seen.items() if name != spec), spec


def test_streaming_defaults_to_four_sinks_and_a_window_of_1020(model):
    assert kvplug.plan(model.config, "streaming", 5000).tokens_kept == 1024
    cache = kvplug.from_spec("streaming", model)
    assert repr(cache.layers[0]) == repr(kvplug.StreamingLLMCache(model).layers[0])


def test_a_spec_takes_the_config_too(model):
    cache = kvplug.from_spec("window:window=8", model.config)
    assert model.config._attn_implementation == "kvplug"
    feed(model, cache, models.tokens(1, 20), [20])
    assert cache.memory().tokens_kept == 8
