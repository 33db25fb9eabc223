"""What a cache leaves behind: nothing. Other models are untouched, the routed one is bit-identical without a cache of
ours, and `detach` gives it back as it was.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvplug
from tests import models
from tests.caches import EVICTING, KEEPING, named
from tests.oracles import LOGITS, SAME_KERNEL, Keep, feed, row_logits

FAMILIES = {
    "llama_sdpa": lambda: models.tiny_llama(attention="sdpa"),
    "llama_eager": lambda: models.tiny_llama(attention="eager"),
    "gemma2": models.tiny_gemma2,
    "gemma3": models.tiny_gemma3,
    "gpt_oss": models.tiny_gpt_oss,
    "qwen3_next": models.tiny_qwen3_next,
}


def outputs(model):
    """Every way to run a model without a cache of ours."""
    _, ids, mask = models.left_padded([5, 14, 9])
    with torch.no_grad():
        yield model(ids, attention_mask=mask, use_cache=False).logits
        yield model(ids).logits
    yield feed(model, DynamicCache(config=model.config), ids, [6, 1, 7])
    yield feed(model, DynamicCache(config=model.config), ids, [6, 1, 7], mask)
    options = {"attention_mask": mask, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    yield torch.stack(model.generate(ids, do_sample=False, **options).logits)
    yield model.generate(ids, do_sample=False, num_beams=3, **options).sequences
    yield feed(model, StaticCache(config=model.config, max_cache_len=32), ids, [6, 1, 7])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_routed_model_without_our_cache_is_bit_identical(family):
    expected = list(outputs(family()))
    model = family()
    before = model.config._attn_implementation
    kvplug.attach(model)
    assert model.config._attn_implementation == "kvplug"
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))
    kvplug.DenseCache(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))
    kvplug.detach(model)
    assert model.config._attn_implementation == before
    assert type(model.config._attn_implementation) is type(before)
    assert all(torch.equal(a, b) for a, b in zip(outputs(model), expected, strict=True))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_another_model_is_untouched(family):
    other = family()
    before = copy.deepcopy(other.config.to_dict())
    expected = list(outputs(other))
    model = family()
    cache = kvplug.QuantCache(model, dtype="int4")
    model.generate(models.tokens(1, 12), past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert other.config._attn_implementation != "kvplug"
    assert other.config.to_dict() == before
    assert all(torch.equal(a, b) for a, b in zip(outputs(other), expected, strict=True))


def test_attaching_and_detaching_twice(model):
    kvplug.attach(model)
    kvplug.attach(model)
    kvplug.DenseCache(model)
    kvplug.detach(model)
    assert model.config._attn_implementation == "sdpa"
    kvplug.detach(model)
    assert model.config._attn_implementation == "sdpa"


def test_the_config_is_as_good_as_the_model(model):
    kvplug.attach(model.config)
    assert model.config._attn_implementation == "kvplug"
    kvplug.detach(model.config)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", **named(KEEPING))
def test_after_detach_a_cache_that_keeps_all_still_answers(model, kind):
    """Nothing routes the attention any more; the handles decode."""
    ids, chunks = models.tokens(1, 20), [9, 1, 10]
    expected = feed(model, kind.make(model), ids, chunks)
    cache = kind.make(model)
    kvplug.detach(model)
    result = feed(model, cache, ids, chunks)
    assert model.config._attn_implementation == "sdpa"
    # Codes meet the same values; only the order of the sums over them differs.
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", **named(KEEPING))
def test_a_cache_of_a_copied_config_decodes(kind, attention):
    """A copy of the config routes nothing, and nothing needs to be routed as long as all tokens are kept."""
    ids, chunks = models.tokens(2, 20), [9, 1, 10]
    model = models.tiny_llama(attention=attention)
    expected = feed(model, kind.make(model), ids, chunks)
    other = models.tiny_llama(attention=attention)
    cache = kind.make(copy.deepcopy(other.config))
    result = feed(other, cache, ids, chunks)
    assert other.config._attn_implementation == attention
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)
    # What was read back was also stored: nothing full-precision stays behind but what should. Both rows and sides, 2
    # heads of 16 channels in fp32.
    assert cache.memory().residual == kind.plain_tokens(20) * 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize("kind", **named(EVICTING))
def test_an_evicting_cache_of_a_copied_config_says_what_to_do(model, kind):
    cache = kind.make(copy.deepcopy(model.config))
    with pytest.raises((ValueError, RuntimeError), match="attach"):
        feed(model, cache, models.tokens(1, 20), [12, 1, 7])
    kvplug.attach(model)
    cache.reset()
    ids, chunks = models.tokens(1, 20), [12, 1, 7]
    logits = feed(model, cache, ids, chunks)[0]
    if kind.exact:
        assert torch.allclose(logits, row_logits(model, ids[0], chunks, kind.keeps), atol=LOGITS, rtol=0)


def test_a_saved_model_loads_without_kvplug_in_its_config(model, tmp_path):
    kvplug.DenseCache(model)
    model.save_pretrained(tmp_path)
    assert "kvplug" not in (tmp_path / "config.json").read_text()
    again = type(model).from_pretrained(tmp_path)
    assert again.config._attn_implementation != "kvplug"
    ids = models.tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_model_loaded_with_the_name(model, tmp_path):
    """`attn_implementation="kvplug"` in `from_pretrained` is as good as `attach`."""
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="kvplug").eval()
    ids, chunks = models.tokens(1, 20), [9, 1, 10]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
    logits = feed(again, kvplug.WindowCache(again, 8), ids, chunks)[0]
    assert torch.allclose(logits, row_logits(model, ids[0], chunks, Keep(window=8)), atol=LOGITS, rtol=0)


def test_a_deep_copy_of_a_routed_model(model):
    kvplug.attach(model)
    twin = copy.deepcopy(model)
    ids, chunks = models.tokens(1, 20), [9, 1, 10]
    logits = feed(twin, kvplug.WindowCache(twin, 8), ids, chunks)[0]
    assert torch.allclose(logits, row_logits(model, ids[0], chunks, Keep(window=8)), atol=LOGITS, rtol=0)
    kvplug.detach(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "kvplug"
    plain = feed(models.tiny_llama(), DynamicCache(), ids, chunks)
    assert torch.allclose(feed(twin, DynamicCache(), ids, chunks), plain, atol=SAME_KERNEL, rtol=0)
