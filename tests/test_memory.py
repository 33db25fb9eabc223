"""The report against an independent walk over all that a cache holds, and the plan against the report, to the byte."""

import dataclasses

import pytest
import torch
from transformers import DynamicCache

import kvplug
from kvplug.stores.residual import UNDO
from tests import models
from tests.caches import KINDS, RECORDING, named
from tests.oracles import NAME, feed, spans
from tests.walker import bytes_held, tensors

PARTS = ("keys", "values", "scales", "residual", "tables", "scores", "spare")
# Pages of a pool that may be spare beside a budget: one that is not full, and those that it grows by at once.
PAGES = 4
FEEDINGS = {
    "prompt": [20],
    "prompt_and_steps": [12, 1, 1, 1],
    "turns": [5, 9, 1, 30],
    "one_by_one": [1] * 11,
    "past_a_slab": [250, 1, 10],
}


def assert_true(cache):
    report = cache.memory()
    assert report.total == bytes_held(cache)
    assert report.total == sum(getattr(report, part) for part in PARTS)
    assert report.ratio == pytest.approx(report.total / report.dense_total if report.dense_total else 0.0)
    assert all(getattr(report, part) >= 0 for part in PARTS)
    return report


@pytest.mark.parametrize("chunks", FEEDINGS.values(), ids=FEEDINGS)
@pytest.mark.parametrize("kind", **named(KINDS))
def test_the_report_is_what_is_held(model, kind, chunks):
    cache, ids = kind.make(model), models.tokens(3, sum(chunks))
    assert_true(cache)
    for start, end in spans(chunks):
        feed(model, cache, ids[:, start:end], [end - start])
        report = assert_true(cache)
        scores = [k.score_bytes(k.count(end, chunks[0])) for k in kind.keeps]
        assert report.scores == 3 * sum(scores)
        assert report.residual == 3 * kind.plain_tokens(end) * 2 * 2 * 16 * 4
        assert report.tokens_seen == end
        # Llama, fp32: 2 layers, keys and values, 2 heads, 16 channels, 4 bytes.
        assert report.dense_total == 3 * end * 2 * 2 * 2 * 16 * 4
    cache.reset()
    assert assert_true(cache).total == kind.empty_bytes


@pytest.mark.parametrize("kind", **named(KINDS))
def test_the_report_after_whatever_generate_does(model, kind):
    _, ids, mask = models.left_padded([5, 14, 9, 1])
    cache = kind.make(model)
    model.generate(ids, attention_mask=mask, past_key_values=cache, num_beams=3, max_new_tokens=12, do_sample=False)
    assert_true(cache)
    cache.batch_select_indices(torch.tensor([3, 1]))
    assert_true(cache)
    cache.batch_repeat_interleave(3)
    assert_true(cache)
    if kind in RECORDING:
        cache.activate_past_recording()
        model(models.tokens(6, 4), **{NAME: cache})
        assert_true(cache)
        cache.crop(-3)
        assert_true(cache)
    for layer in cache.layers:
        layer.offload()
    assert_true(cache)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_no_view_pins_the_prompt(model, kind):
    """Right after a prompt of 600 tokens what is held is what is stored: no slice of the full-precision prompt is left,
    and under a budget next to nothing is."""
    cache = kind.make(model)
    feed(model, cache, models.tokens(1, 600), [600])
    report = assert_true(cache)
    plain = sum(tensor.numel() for tensor in tensors(cache) if tensor.dtype == torch.float32)
    if not kind.exact:
        # Sinks, residual, a group that is not full and what can be undone, on both sides; 2 heads of 16 channels.
        room = [keep.sinks + keep.residual + keep.group + UNDO for keep in kind.keeps if keep.group]
        scores = sum(keep.score_bytes(keep.count(600, 600)) // 4 for keep in kind.keeps)
        plain -= kind.empty_bytes // 4
        plain -= sum(
            k.numbers * layer.store.encoded.capacity if k.numbers else 0
            for k, layer in zip(kind.keeps, cache.layers, strict=True)
        )
        assert plain - scores <= sum(room) * 2 * 2 * 16, "full-precision numbers beside the codes"
    most = 0
    for layer, keep, budget in zip(cache.layers, kind.keeps, kind.budgets(600), strict=True):
        if budget is not None:
            # Both sides, 2 heads; positions, which may be those of each head, and owners of pages.
            slots = budget if cache.pool is None else budget + PAGES * cache.pool.page_size
            limit = 2 * 2 * slots * (16 * 4 + 4) + (8 if keep.positional else 12) * budget
            limit += keep.score_bytes(budget)
            # In a pool a layer holds what all of them do.
            assert cache.pool is not None or bytes_held(layer) <= limit
            most += limit
    assert most == 0 or bytes_held(cache) <= most
    if not kind.evicts:
        assert report.spare <= 256 / 600 * (report.used - report.residual) + plain * 4


def test_bits_of_an_element(model):
    """16 channels: codes, and 16 bits each of scale and zero point for a token and head; fp8 has no zero point."""
    expected = {"dense": 32, "fp8": 8 + 16 / 16, "int8": 8 + 32 / 16}
    # int4: a scale a token, and for keys in groups of 8 another 16 bits a channel for every group.
    expected |= {"int4:group_size=8,residual=0,sinks=0": 4 + 16 / 16 + 16 / 8 / 2}
    expected |= {"quant:values=int8,group_size=8,residual=0,sinks=0": (7 + 10) / 2}
    for spec, bits in expected.items():
        cache = kvplug.from_spec(spec, model)
        feed(model, cache, models.tokens(2, 40), [40])
        assert cache.memory().bits_per_element == pytest.approx(bits)
        assert cache.memory().bytes_per_token == pytest.approx(bits / 8 * 2 * 2 * 2 * 16)


def test_the_dense_total_is_what_the_default_cache_holds(model):
    default = DynamicCache()
    feed(models.tiny_llama(), default, models.tokens(2, 33), [33])
    cache = kvplug.QuantCache(model)
    feed(model, cache, models.tokens(2, 33), [33])
    assert cache.memory().dense_total == bytes_held(default)


FAMILIES = {
    "gemma2": models.tiny_gemma2,
    "gemma3": models.tiny_gemma3,
    "gpt_oss": models.tiny_gpt_oss,
    "qwen3_next": models.tiny_qwen3_next,
}


@pytest.mark.parametrize(
    "spec", ["dense", "int4", "window:window=6+int8", "streaming:sinks=1,window=5,positions=original"]
)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_layers_of_transformers_are_counted_too(family, spec):
    model = family()
    cache = kvplug.from_spec(spec, model)
    for chunk in (30, 1, 1, 5):
        feed(model, cache, models.tokens(2, chunk), [chunk])
        assert_true(cache)


SPECS = [
    "dense",
    "fp8",
    "int8",
    "int4",
    "int4:group_size=8,residual=6,sinks=2",
    "quant:keys=int8,values=int4",
    "quant:keys=int3,values=int2,group_size=5,residual=40,sinks=0",
    "quant:keys=dense,values=fp8",
    "window:window=8",
    "window:window=300+int4",
    "streaming:sinks=2,window=6",
    "streaming:sinks=4,window=270,positions=original+int8",
    "paged",
    "window:window=300+int4+paged:page_size=5",
]
LENGTHS = [0, 1, 7, 8, 9, 33, 64, 255, 256, 257, 300, 700]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_the_plan_is_the_report(spec, batch, dtype):
    """However the tokens come: at once, or in two parts. Keys and values are given by hand, which is quick."""
    model = models.tiny_llama()
    for tokens in LENGTHS:
        plan = kvplug.plan(model.config, spec, tokens, batch=batch, dtype=dtype)
        assert model.config._attn_implementation == "sdpa", "planning must not route the model"
        for chunks in ([tokens], [tokens // 3, tokens - tokens // 3]):
            cache = kvplug.from_spec(spec, models.tiny_llama())
            for chunk in filter(None, chunks):
                states = torch.zeros(batch, 2, chunk, 16, dtype=dtype)
                for layer in range(2):
                    cache.update(states, states, layer)
            report = cache.memory()
            if tokens:
                assert plan == report, f"{tokens} tokens as {chunks}"
            assert plan.total == bytes_held(cache)


@pytest.mark.parametrize("spec", SPECS)
def test_the_plan_of_what_generate_leaves(spec):
    model = models.tiny_llama()
    cache = kvplug.from_spec(spec, model)
    made = model.generate(models.tokens(2, 30), past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert kvplug.plan(model.config, spec, made.shape[1] - 1, batch=2) == cache.memory()


@pytest.mark.parametrize("chunks", [[40], [12, 1, 7]], ids=["prompt", "turns"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_plan_of_a_model_with_eager_attention(spec, chunks):
    """There every forward comes with a mask; without padding in it nothing more is kept."""
    model = models.tiny_llama(attention="eager")
    cache = kvplug.from_spec(spec, model)
    feed(model, cache, models.tokens(2, sum(chunks)), chunks)
    assert kvplug.plan(model.config, spec, sum(chunks), batch=2) == cache.memory()


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss"])
def test_the_plan_of_a_hybrid(family, tokens):
    model = FAMILIES[family]()
    for spec in ("int4", "window:window=6+int8"):
        cache = kvplug.from_spec(spec, model)
        feed(model, cache, models.tokens(2, tokens), [tokens])
        assert kvplug.plan(model.config, spec, tokens, batch=2) == cache.memory()


def test_the_plan_takes_its_dtype_from_the_config():
    config = models.tiny_llama().config
    config.dtype = torch.bfloat16
    half, full = kvplug.plan(config, "dense", 100), kvplug.plan(config, "dense", 100, dtype=torch.float32)
    assert 2 * half.total == full.total
    assert half.dense_total * 2 == full.dense_total


def test_a_plan_allocates_nothing():
    """A million tokens of 40 layers, which no test machine could hold."""
    config = models.tiny_llama().config
    config.num_hidden_layers, config.head_dim = 40, 128
    plan = kvplug.plan(config, "int4:group_size=64", 1_000_000, batch=64)
    assert plan.dense_total == 64 * 10**6 * 40 * 2 * 2 * 128 * 4
    assert plan.bits_per_element == pytest.approx(4 + 16 / 128 + 16 / 64 / 2, rel=1e-3)  # some tokens stay in fp32
    assert plan.spare <= plan.used / 8


def test_a_report_is_plain_data(model):
    report = kvplug.plan(model.config, "int4", 100)
    assert dataclasses.is_dataclass(report)
    with pytest.raises(AttributeError):
        report.keys = 0
    text = str(report)
    assert "100" in text
    assert f"{report.bits_per_element:.2f}" in text


def test_generate_itself_compresses(model):
    """Nothing else has to be called: after `generate` the codes are there and the full precision is gone."""
    cache = kvplug.QuantCache(model, group_size=8, residual=0, sinks=0)
    model.generate(models.tokens(1, 300), past_key_values=cache, max_new_tokens=8, do_sample=False)
    report = assert_true(cache)
    assert {t.dtype for t in tensors(cache)} == {torch.uint8, torch.bfloat16, torch.float32}
    assert report.residual == 3 * 2 * 2 * 2 * 16 * 4  # the last 3 of 307 tokens wait for their group
    assert report.bits_per_element == pytest.approx(6, rel=0.05)
    assert report.used * 4 < report.dense_total


def test_an_unfinished_forward_is_counted(model):
    """Keys and values that came in by hand and that no attention has read yet are held, and reported."""
    cache = kvplug.QuantCache(model)
    states = torch.randn(1, 2, 50, 16)
    cache.update(states, states, 0)
    assert cache.layers[0].get_seq_length() == 50
    assert_true(cache)
