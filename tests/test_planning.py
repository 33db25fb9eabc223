"""The plan against what a real model leaves in its cache, to the byte: every cache, every kind of layer, however the
tokens come in; and the numbers of tokens that fit against counting.
"""

import copy
import json
import resource

import pytest
import torch
import transformers

import kvplug
from kvplug.planning import Planner
from kvplug.probe import probe
from tests import models
from tests.caches import KINDS
from tests.oracles import feed
from tests.walker import bytes_held

# The kinds of tests/caches.py that a spec can say; those with a policy or codec for each layer, or with groups that
# differ by side, are built by hand alone.
BY_HAND = {"int2_values_groups_of_4_and_8", "channel_keys_token_values"}
SPECS = {
    "dense": "dense",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4:group_size=8,residual=6,sinks=2",
    "int3_groups_of_4": "quant:keys=int3,values=int3,group_size=4,residual=0,sinks=0",
    "int8_residual": "int8:residual=3,sinks=2",
    "int8_keys_int4_values": "quant:keys=int8,values=int4,residual=0,sinks=2",
    "paged": "paged:page_size=4",
    "paged_int8": "paged:page_size=3+int8",
    "window": "window:window=8",
    "window_int4": "window:window=8+int4",
    "streaming": "streaming:sinks=2,window=6",
    "no_sinks": "streaming:sinks=0,window=8",
    "streaming_original": "streaming:sinks=2,window=6,positions=original",
    "streaming_int8": "streaming:sinks=2,window=6+int8",
    "streaming_original_fp8": "streaming:sinks=2,window=6,positions=original+fp8",
    "h2o": "h2o:budget=8,sinks=2",
    "snapkv": "snapkv:budget=8,sinks=2,observe=4,kernel=3",
    "tova": "tova:budget=8,sinks=2",
    "keydiff": "keydiff:budget=8,sinks=2",
    "knorm": "knorm:budget=8,sinks=2",
    "expected_attention": "expected_attention:budget=8,sinks=2,future=16",
    "h2o_adaptive": "h2o:budget=8,recent=2,sinks=2,heads=adaptive",
    "snapkv_adaptive_int8": "snapkv:budget=8,sinks=2,observe=4,kernel=3,heads=adaptive+int8",
    "h2o_int4": "h2o:budget=8,sinks=2+int4",
    "paged_h2o_int4": "h2o:budget=8,sinks=2+int4+paged:page_size=3",
    "keydiff_share": "keydiff:budget=0.5,sinks=2",
    "shared_int4": "shared:groups=cla2+int4:group_size=8,residual=6,sinks=2",
    "shared_h2o": "h2o:budget=8,sinks=2+shared:groups=cla2",
}
FAMILIES = {
    "llama_grouped": models.tiny_llama,
    "llama_multi_head": lambda **kw: models.tiny_llama(num_key_value_heads=4, **kw),
    "falcon_multi_query": models.tiny_falcon,
    "deepseek_latent": models.tiny_deepseek,
    "gemma2_sliding": models.tiny_gemma2,
    "gemma3_sliding": models.tiny_gemma3,
    "gpt_oss_sliding": models.tiny_gpt_oss,
    "gemma3n_shared": models.tiny_gemma3n,
    "qwen3_next_linear": models.tiny_qwen3_next,
    "lfm2_convolution": models.tiny_lfm2,
    "jamba_state_space": models.tiny_jamba,
    "bloom_own_attention": models.tiny_bloom,
}
OWN_CODE = ("falcon_multi_query", "bloom_own_attention", "deepseek_latent")
# Their keys have no rotation, or one that kvplug can't move.
UNMOVED = ("gpt_oss_sliding", "jamba_state_space")
FEEDINGS = {"prompt": [20], "short_prompt": [3], "one_by_one": [1] * 11, "turns": [12, 1, 7, 1]}
# A plan is of tokens that come as a prompt where that matters: for a share of it, and for heads that compete, which
# they do after a forward of several tokens.
PLANNED = {
    SPECS["keydiff_share"]: ("prompt", "short_prompt"),
    SPECS["h2o_adaptive"]: ("prompt", "short_prompt", "turns"),
    SPECS["snapkv_adaptive_int8"]: ("prompt", "short_prompt", "turns"),
}


def evicts(spec):
    return spec.partition(":")[0] in kvplug.policies.POLICIES


def test_every_kind_of_cache_is_planned():
    """A kind without a spec here is one whose layers differ."""
    assert {kind.name for kind in KINDS if len({repr(keep) for keep in kind.keeps}) == 1} <= set(SPECS) | BY_HAND


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_what_a_forward_leaves(family, spec):
    model = FAMILIES[family]()
    moves = spec.startswith("expected") or (spec.startswith("streaming:sinks=2") and "positions=original" not in spec)
    if family in UNMOVED and moves:
        for make in (kvplug.from_spec, lambda *arguments: kvplug.plan(*reversed(arguments), 20)):
            with pytest.raises(ValueError, match="re-rotated"):
                make(spec, model)
        return
    if family in OWN_CODE and evicts(spec):
        with pytest.raises(ValueError, match=r"keeps all|re-rotated"):
            kvplug.plan(model.config, spec, 20)
        with pytest.raises(ValueError, match=r"keeps all|re-rotated"):
            feed(model, kvplug.from_spec(spec, model), models.tokens(1, 20), [12, 8])
        return
    for name, chunks in FEEDINGS.items():
        if name not in PLANNED.get(spec, FEEDINGS):
            continue
        cache = kvplug.from_spec(spec, model)
        feed(model, cache, models.tokens(2, sum(chunks)), chunks)
        planned = kvplug.plan(model.config, spec, sum(chunks), batch=2)
        assert planned == cache.memory(), chunks
        assert planned.total == bytes_held(cache), chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gemma3n_shared", "qwen3_next_linear", "lfm2_convolution", "jamba_state_space"])
def test_states_have_a_dtype_of_their_own(family, dtype):
    """Some states are fp32 in a 16-bit model."""
    model = FAMILIES[family]().to(dtype)
    cache = kvplug.from_spec("int4", model)
    feed(model, cache, models.tokens(3, 20), [19, 1])
    planned = kvplug.plan(model.config, "int4", 20, batch=3, dtype=dtype)
    assert planned == cache.memory()
    assert planned.total == bytes_held(cache)


def test_layers_that_share_are_counted_once():
    alone = models.tiny_gemma3n(num_kv_shared_layers=0).config
    shared = models.tiny_gemma3n().config
    assert 2 * kvplug.plan(shared, "dense", 100).keys < 2 * kvplug.plan(alone, "dense", 100).keys
    assert Planner(shared, "dense").layers["full"] == 1
    assert Planner(alone, "dense").layers["full"] == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_the_config_stays_as_it_is(family):
    config = FAMILIES[family]().config
    before, state = json.dumps(config.to_dict(), default=str), torch.get_rng_state()
    kvplug.plan(config, "int4", 100)
    assert json.dumps(config.to_dict(), default=str) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_no_weights_are_allocated():
    """A model of 70 billion parameters: the process grows by less than a thousandth of them."""
    config = transformers.LlamaConfig(
        hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, intermediate_size=28672
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = kvplug.plan(config, "fp8", 10**6, batch=8, dtype=torch.bfloat16)
    assert plan.dense_total == 8 * 10**6 * 327_680
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 140_000  # KiB; the weights are 140 GB


def test_a_layer_that_can_t_be_sized_is_named():
    """Its model asks for a cache of its own, so nothing tells what the states would be."""
    config = transformers.MiniMaxConfig(
        **models.TINY, layer_types=["linear_attention", "full_attention"], num_local_experts=2
    )
    with pytest.raises(ValueError, match=r"MiniMaxConfig.*layer 0.*LinearAttention"):
        kvplug.plan(config, "int4", 100)


def test_without_a_forward_the_config_tells(monkeypatch):
    """A model that can't be built, such as one with code of its own, is planned from its heads and widths."""
    config = models.tiny_llama(num_hidden_layers=3, rms_norm_eps=3e-6).config
    expected = kvplug.plan(config, "int4", 100)
    config = copy.deepcopy(config)
    config.rms_norm_eps = 4e-6  # not known yet
    monkeypatch.setattr(transformers.AutoModel, "from_config", None)
    assert probe(config, torch.float32).routable is None
    assert kvplug.plan(config, "int4", 100) == expected


@pytest.mark.parametrize("spec", ["dense", "int4", "window:window=270"])
@pytest.mark.parametrize("family", ["llama_grouped", "gemma3_sliding"])
def test_totals_never_fall_and_fits_is_the_last_that_fits(family, spec):
    planner = Planner(FAMILIES[family]().config, spec)
    totals = [planner.report(tokens, 2).total for tokens in range(0, 300)]
    assert totals == sorted(totals)
    for memory in (*totals[1::93], totals[1] - 1, totals[5] + 1, totals[258] - 1, totals[-1] + 1):
        expected = max(tokens for tokens, total in enumerate(totals) if total <= memory)
        fits = planner.fits(memory, 2)
        if evicts(spec) and memory >= totals[-1]:
            assert fits is None
        elif memory < totals[-1]:
            assert fits == expected
        else:
            assert planner.report(fits, 2).total <= memory < planner.report(fits + 1, 2).total


def test_past_what_settles_only_layers_that_keep_all_grow():
    """The two figures that a table shows, against differences of totals."""
    for family in FAMILIES.values():
        planner = Planner(family().config, "dense")
        start = planner.settled
        assert planner.report(start + 50).used - planner.report(start).used == 50 * planner.bytes_per_token
        rest = planner.report(start).used + planner.report(start).spare - planner.fixed()
        assert rest >= start * planner.bytes_per_token
    planner = Planner(models.tiny_gemma3().config, "window:window=20")
    assert planner.settled == planner.budget == 20
    assert planner.report(10**6).total == planner.report(20).total
