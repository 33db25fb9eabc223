"""Models that mix kinds of layers: full-attention layers are ours, the others keep transformers' own classes, and with
room enough every model answers as with its default cache. What can't work says so.
"""

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

import kvplug
from kvplug.layer import KVLayer
from kvplug.policies import SinkWindow, Window
from tests import models
from tests.oracles import LOGITS, SAME_KERNEL, Keep, feed, row_logits

FAMILIES = {
    "phi_partial_rotary": models.tiny_phi,
    "glm_interleaved_rotary": models.tiny_glm,
    "gemma2_softcap": models.tiny_gemma2,
    "gemma3": models.tiny_gemma3,
    "gpt_oss_sinks": models.tiny_gpt_oss,
    "qwen3_next_linear": models.tiny_qwen3_next,
    "bloom_own_attention": models.tiny_bloom,
    "deepseek_latent": models.tiny_deepseek,
}
UNROUTED = {name: FAMILIES[name] for name in ("bloom_own_attention", "deepseek_latent")}
ROUTED = {name: family for name, family in FAMILIES.items() if name not in UNROUTED}
ROOM = {
    "dense": lambda m: kvplug.DenseCache(m),
    "window": lambda m: kvplug.WindowCache(m, 64),
    "streaming": lambda m: kvplug.StreamingLLMCache(m, 4, 60, positions="original"),
}
CHUNKS = [11, 1, 1, 7, 1]


@pytest.mark.parametrize("family", ROUTED.values(), ids=ROUTED)
def test_only_full_attention_layers_are_ours(family):
    model = family()
    cache = kvplug.QuantCache(model)
    for ours, theirs in zip(cache.layers, DynamicCache(config=model.config).layers, strict=True):
        if type(theirs) is DynamicLayer:
            assert isinstance(ours, KVLayer)
        else:
            assert type(ours) is type(theirs)
    kinds = {type(layer) for layer in cache.layers}
    assert (DynamicSlidingWindowLayer in kinds) == (model.config.model_type in ("gemma2", "gemma3_text", "gpt_oss"))
    assert (LinearAttentionLayer in kinds) == (model.config.model_type == "qwen3_next")


@pytest.mark.parametrize("room", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("family", ROUTED.values(), ids=ROUTED)
def test_with_room_the_logits_are_the_default_cache_s(family, room):
    model, other = family(), family()
    ids = models.tokens(2, 21)
    expected = feed(other, DynamicCache(config=other.config), ids, CHUNKS)
    result = feed(model, room(model), ids, CHUNKS)
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("room", ROOM.values(), ids=ROOM)
@pytest.mark.parametrize("family", ROUTED.values(), ids=ROUTED)
def test_with_room_generate_gives_the_default_cache_s_tokens(family, room):
    _, ids, mask = models.left_padded([5, 14, 9])
    expected = family().generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    model = family()
    made = model.generate(ids, attention_mask=mask, past_key_values=room(model), max_new_tokens=12, do_sample=False)
    assert made.equal(expected)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_prompt_is_exact_and_steps_are_close_under_a_codec(family, dtype):
    """The prompt is attended as it came in. Eight bits then move the next logits by far less than a wrong token does:
    those of two different prompts differ by more than 1."""
    model, other = family(), family()
    ids, wrong = models.tokens(2, 13), models.tokens(2, 13, seed=1)
    wrong[:, -1] = ids[:, -1]
    full = feed(other, DynamicCache(config=other.config), ids, [12, 1])
    cache = kvplug.QuantCache(model, dtype=dtype)
    result = feed(model, cache, ids, [12, 1])
    assert torch.allclose(result[:, :12], full[:, :12], atol=SAME_KERNEL, rtol=0)
    distance = (feed(other, DynamicCache(config=other.config), wrong, [12, 1]) - full)[:, 12].abs().amax()
    assert (result - full)[:, 12].abs().amax() < distance / 4
    assert not torch.equal(result[:, 12], full[:, 12]), "nothing was read back from codes"


@pytest.mark.parametrize("family", ["gemma2_softcap", "gemma3", "gpt_oss_sinks"])
def test_a_window_of_ours_is_the_sliding_window_of_the_model(family):
    """Full-attention layers under a window of 7, fed one by one, equal the same weights declared as sliding attention
    over 8, which shows a query itself and 7 tokens before it."""
    settings = {}
    if family == "gemma3":  # where each kind of layer has a rotation of its own
        settings["rope_parameters"] = dict.fromkeys(("full_attention", "sliding_attention"), models.ROPES["default"])
    layers = FAMILIES[family]().config.num_hidden_layers
    ids, steps = models.tokens(2, 24), [1] * 24
    sliding = FAMILIES[family](layer_types=["sliding_attention"] * layers, **settings)
    expected = feed(sliding, DynamicCache(config=sliding.config), ids, steps)
    model = FAMILIES[family](layer_types=["full_attention"] * layers, **settings)
    result = feed(model, kvplug.WindowCache(model, 7), ids, steps)
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


SPECIAL = {
    "gemma2_softcap": lambda: models.tiny_gemma2(layer_types=["full_attention"] * 2),
    "gpt_oss_sinks": lambda: models.tiny_gpt_oss(layer_types=["full_attention"] * 2),
}


def under_sdpa(model):
    model.config._attn_implementation_internal = "sdpa"  # past the check that keeps some models from it
    return model


@pytest.mark.parametrize("room", ["window", "streaming"])
@pytest.mark.parametrize("family", SPECIAL.values(), ids=SPECIAL)
def test_soft_capping_and_learned_sinks_under_sdpa(family, room):
    """sdpa has neither; a compressing cache has both from the first forward on, and answers as eager attention does."""
    ids = models.tokens(2, 21)
    expected = feed(family(), DynamicCache(), ids, CHUNKS)
    model = under_sdpa(family())
    assert torch.allclose(feed(model, ROOM[room](model), ids, CHUNKS), expected, atol=LOGITS, rtol=0)


def test_the_exact_cache_under_sdpa_is_the_default_cache_under_sdpa():
    """What a model computes without us is what it computes with DenseCache, even where sdpa leaves the sinks out."""
    ids, family = models.tokens(2, 21), SPECIAL["gpt_oss_sinks"]
    other = under_sdpa(family())
    expected = feed(other, DynamicCache(), ids, CHUNKS)
    model = under_sdpa(family())
    assert torch.allclose(feed(model, kvplug.DenseCache(model), ids, CHUNKS), expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("family", ["phi_partial_rotary", "glm_interleaved_rotary"])
def test_compact_positions_under_other_rotations(family):
    """One layer: a fresh forward over what is kept, at the positions of the short sequence."""
    model, other = FAMILIES[family](num_hidden_layers=1), FAMILIES[family](num_hidden_layers=1)
    ids, keep = models.tokens(1, 24), Keep(sinks=2, window=6)
    logits = feed(model, kvplug.StreamingLLMCache(model, 2, 6), ids, [1] * 24)[0]
    for seen in range(24):
        kept = [*keep.stored(seen), seen]
        with torch.no_grad():
            expected = other(ids[:, kept], attention_mask=torch.ones(1, len(kept)), use_cache=False).logits[0, -1]
        assert torch.allclose(logits[seen], expected, atol=LOGITS, rtol=0)


def test_a_sliding_layer_keeps_its_window_and_releases_the_prompt():
    """transformers keeps views of the prompt there; what is held must be the window."""
    model = models.tiny_gemma3()
    cache = kvplug.DenseCache(model)
    feed(model, cache, models.tokens(1, 200), [200])
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            assert layer.keys.untyped_storage().nbytes() <= 2 * 8 * 16 * 4  # kv_heads, window, head_dim, fp32


@pytest.mark.parametrize("family", UNROUTED.values(), ids=UNROUTED)
def test_a_model_that_reads_the_cache_itself_works_while_all_is_kept(family):
    """Bloom computes attention in its own code, DeepSeek expands the latents before attention: handles decode."""
    ids = models.tokens(2, 21)
    expected = feed(family(), DynamicCache(), ids, CHUNKS)
    model = family()
    cache = kvplug.DenseCache(model)
    result = feed(model, cache, ids, CHUNKS)
    assert torch.allclose(result, expected, atol=SAME_KERNEL, rtol=0)
    for spec in ("dense", "int8", "int4", "int4:group_size=4,residual=3,sinks=1"):
        cache = kvplug.from_spec(spec, model)
        feed(model, cache, ids, CHUNKS)
        assert (cache.memory().residual > 0) == spec.startswith("int4")
        assert cache.memory() == kvplug.plan(model.config, spec, 21, batch=2)


def test_latents_refuse_to_be_dropped():
    """The expanded latents would meet the mask of other columns."""
    model = models.tiny_deepseek()
    with pytest.raises(ValueError, match=r"evicts.*keeps all tokens"):
        feed(model, kvplug.WindowCache(model, 8), models.tokens(1, 20), [12, 8])


@pytest.mark.parametrize("policy", [Window(8), SinkWindow(2, 6, positions="original")], ids=["window", "streaming"])
def test_a_model_with_its_own_attention_code_refuses_to_drop(policy):
    model = models.tiny_bloom()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=r"policy.*Bloom"):
        kvplug.KVCache(model, policy=policy)
    assert model.config._attn_implementation == before


def test_an_encoder_decoder_takes_ours_for_self_attention():
    config = transformers.BartConfig(
        vocab_size=models.VOCAB, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, init_std=0.2, pad_token_id=0,
        bos_token_id=None, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    ids = models.tokens(2, 9)
    expected = models.build(transformers.BartForConditionalGeneration, config).generate(
        ids, max_new_tokens=10, do_sample=False
    )
    model = models.build(transformers.BartForConditionalGeneration, config)
    cache = transformers.EncoderDecoderCache(kvplug.DenseCache(model), DynamicCache())
    made = model.generate(ids, past_key_values=cache, max_new_tokens=10, do_sample=False)
    assert made.equal(expected)


@pytest.mark.parametrize("from_config", [False, True], ids=["model", "config"])
def test_a_decoder_inside_of_a_larger_model(from_config):
    """Llava: the text decoder's own config is routed, not that of the whole, and answers as the decoder alone does."""
    text = transformers.LlamaConfig(**models.TINY)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
    model = models.build(transformers.LlavaForConditionalGeneration, config)
    alone = models.tiny_llama()
    alone.model.load_state_dict(model.model.language_model.state_dict())
    alone.lm_head.load_state_dict(model.lm_head.state_dict())
    ids = models.tokens(1, 20) % 95 + 1  # no image token
    cache = kvplug.StreamingLLMCache(model.config if from_config else model, 2, 6)
    logits = feed(model, cache, ids, [12, 1, 7])[0]
    expected = row_logits(alone, ids[0], [12, 1, 7], Keep(2, 6, compact=True))
    assert torch.allclose(logits, expected, atol=LOGITS, rtol=0)
    assert model.config.text_config._attn_implementation == "kvplug"
    assert model.config.vision_config._attn_implementation == "sdpa"
    kvplug.detach(model)
    assert model.config.text_config._attn_implementation == "sdpa"


def test_a_model_without_full_attention_is_refused():
    config = transformers.MistralConfig(**{**models.TINY, "sliding_window": 8})
    model = models.build(transformers.MistralForCausalLM, config)
    with pytest.raises(ValueError, match="full-attention"):
        kvplug.DenseCache(model)


def test_half_the_budget_of_a_hybrid_drops_in_the_full_layers_alone():
    model = models.tiny_gemma3()
    cache = kvplug.WindowCache(model, 6)
    feed(model, cache, models.tokens(1, 20), [12, 1, 7])
    assert cache.get_seq_length() == 20
    for layer in cache.layers:
        expected = 6 if isinstance(layer, KVLayer) else 7
        assert layer.keys.shape[2] == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_with_room_for_the_prompt_alone(attention):
    """The same under both implementations: one token beyond the room drops one token."""
    ids = models.tokens(1, 13)
    model = models.tiny_llama(attention=attention)
    logits = feed(model, kvplug.WindowCache(model, 11), ids, [11, 1, 1])[0]
    expected = row_logits(model, ids[0], [11, 1, 1], Keep(window=11))
    assert torch.allclose(logits, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("from_config", [False, True], ids=["model", "config"])
@pytest.mark.parametrize("make", [models.tiny_bloom, models.tiny_falcon], ids=["bloom", "falcon"])
def test_a_model_with_its_own_attention_code_is_left_alone(make, from_config):
    """Its code may ask for the name of its attention, and take another way where it is not one of those it knows."""
    model, ids = make(), models.tokens(2, 9)
    before, name = model(ids, use_cache=False).logits, model.config._attn_implementation
    cache = kvplug.DenseCache(model.config if from_config else model)
    assert model(ids, use_cache=False).logits.equal(before)
    assert model.config._attn_implementation == name
    assert torch.allclose(model(ids, past_key_values=cache).logits, before, atol=1e-4)
    with pytest.raises(ValueError, match="has its own attention code"):
        kvplug.attach(model)
