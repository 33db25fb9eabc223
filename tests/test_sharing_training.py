"""Training through a cache: gradients are those of the same model without one, written by hand, in float64."""

import math

import pytest
import torch

import kvplug
from tests import models
from tests.caches import keep
from tests.codec_twins import ROUND_TRIPS
from tests.oracles import NAME, feed, visibility
from tests.sharing_oracles import GROUPINGS, Lending, by_hand
from tests.walker import bytes_held, tensors

GROUPS = GROUPINGS["apart"]
SHARED = "shared:groups=0-3/1-2-4"
BORROWERS = (2, 3, 4)
# Relative to the largest gradient of a parameter. Eager attention takes its softmax in fp32 whatever the model's dtype,
# as kvplug's kernels compute, and layers of wide weights amplify that; a wrong gradient is off by more than a tenth.
CLOSE = {"sdpa": 1e-6, "eager": 1e-3}


def deep_llama(**settings):
    return models.tiny_llama(num_hidden_layers=5, **settings).double().train()


def loss_of(logits, ids):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def gradients(model, loss):
    """The gradient of each parameter by name, None where there is none."""
    model.zero_grad()
    loss.backward()
    return {name: None if x.grad is None else x.grad.clone() for name, x in model.named_parameters()}


def assert_alike(found, expected, unused=(), close=CLOSE["sdpa"]):
    """Relative to the largest one of each parameter; `unused` layers have none for keys and values."""
    assert found.keys() == expected.keys()
    for name, other in expected.items():
        borrowed = any(f"layers.{i}.self_attn.{side}_proj" in name for i in unused for side in "kv")
        assert (other is None) == borrowed == (found[name] is None), name
        if other is not None:
            assert other.abs().max() > 0, name
            assert (found[name] - other).abs().max() < close * other.abs().max(), name


# The prompt's attention is exact under all of them.
SPECS = {
    "dense": "",
    "int8": "+int8",
    "int4": "+int4:group_size=8,residual=6,sinks=2",
    "window": "+window:window=8",
    "streaming": "+streaming:sinks=2,window=6",
    "h2o": "+h2o:budget=8,sinks=2",
    "h2o_adaptive": "+h2o:budget=8,heads=adaptive",
    "expected_attention_int8": "+expected_attention:budget=8,future=16+int8",
    "keydiff": "+keydiff:budget=8",
    "paged_h2o": "+h2o:budget=8+paged:page_size=3",
    "paged": "+paged:page_size=3",
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_gradients_are_those_of_shared_keys_and_values(spec, attention):
    ids, model, other = models.tokens(2, 20), deep_llama(attention=attention), deep_llama()
    expected = gradients(other, loss_of(by_hand(other, ids, GROUPS), ids))
    cache = kvplug.from_spec(SHARED + spec, model)
    found = gradients(model, loss_of(model(ids, **{NAME: cache}).logits, ids))
    assert_alike(found, expected, BORROWERS, CLOSE[attention])
    assert cache.get_seq_length() == 20
    assert not any(x.requires_grad for x in tensors(cache.layers)), "what is held must not hold the graph"
    assert cache.memory().total == bytes_held(cache.layers)


@pytest.mark.parametrize("spec", ["dense", *(spec[1:] for spec in SPECS.values() if spec)])
def test_gradients_of_a_cache_without_sharing(spec):
    ids, model, other = models.tokens(2, 20), deep_llama(), deep_llama()
    expected = gradients(other, loss_of(other(ids, use_cache=False).logits, ids))
    found = gradients(model, loss_of(model(ids, **{NAME: kvplug.from_spec(spec, model)}).logits, ids))
    assert_alike(found, expected)


@pytest.mark.parametrize("spec", ["dense", "int8", "int4"])
def test_gradients_of_latent_attention(spec):
    """The model expands what the cache gives back: its gradients must reach the projections of the latents."""
    ids, model, other = models.tokens(2, 20), models.tiny_deepseek().double(), models.tiny_deepseek().double()
    expected = gradients(other, loss_of(other(ids, use_cache=False).logits, ids))
    cache = kvplug.from_spec(spec, model)
    found = gradients(model, loss_of(model(ids, **{NAME: cache}).logits, ids))
    assert_alike(found, expected)
    assert any("kv_a_proj" in name and x.abs().max() > 0 for name, x in found.items())
    assert cache.memory().total == bytes_held(cache.layers)


def eight_bits(side):
    return lambda x: ROUND_TRIPS["int8"](x.float()).double()


LATER = {
    "dense": ("", None, None),
    "paged": ("+paged:page_size=3", None, None),
    "int8": ("+int8", (eight_bits("keys"), eight_bits("values")), None),
    "int4_all_residual": ("+int4:residual=32", None, None),
    "window": ("+window:window=8", None, keep(window=8)),
    "streaming": ("+streaming:sinks=2,window=6,positions=original", None, keep(sinks=2, window=6)),
}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("spec", "coded", "kept"), LATER.values(), ids=LATER)
def test_to_a_later_forward_the_past_is_a_constant(spec, coded, kept, attention):
    ids, model, other = models.tokens(2, 22), deep_llama(attention=attention), deep_llama()
    mask = None if kept is None else visibility([13, 9], kept)
    logits = by_hand(other, ids, GROUPS, past=13, coded=coded, mask=mask)[:, 13:]
    expected = gradients(other, loss_of(logits, ids[:, 13:]))
    cache = kvplug.from_spec(SHARED + spec, model)
    first = model(ids[:, :13], **{NAME: cache}).logits
    second = model(ids[:, 13:], **{NAME: cache}).logits
    close = CLOSE["eager" if kept or coded else attention]
    assert torch.allclose(second, logits, atol=close, rtol=0)
    found = gradients(model, loss_of(second, ids[:, 13:]))
    assert_alike(found, expected, BORROWERS, close)
    assert first.requires_grad, "a graph of its own"
    assert not any(x.requires_grad for x in tensors(cache.layers))


def test_a_padded_batch_is_trained_as_over_the_owner_s_tensors():
    """transformers' own cache keeps the graph too, so its gradients are the oracle of a batch with padding."""
    _, ids, mask = models.left_padded([5, 20, 9])
    results = []
    for make in (lambda m: kvplug.SharedCache(m, GROUPS, codec="int8"), lambda m: Lending(m.config, GROUPS)):
        model = deep_llama()
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        labels = ids.masked_fill(mask == 0, -100)
        out = model(ids, attention_mask=mask, position_ids=positions, labels=labels, **{NAME: make(model)})
        results.append(gradients(model, out.loss))
    assert_alike(*results, BORROWERS)


@pytest.mark.parametrize("codec", [None, "int8"])
def test_dropout_is_the_model_s_own(codec):
    ids, results = models.tokens(2, 20), []
    for make in (lambda m: kvplug.SharedCache(m, GROUPS, codec=codec), lambda m: Lending(m.config, GROUPS)):
        model = deep_llama(attention_dropout=0.5)
        torch.manual_seed(5)
        results.append(gradients(model, loss_of(model(ids, **{NAME: make(model)}).logits, ids)))
    assert_alike(*results, BORROWERS)


@pytest.mark.parametrize("spec", ["", "+int8", "+h2o:budget=8"])
def test_three_steps_of_training_and_then_decoding(spec):
    """One cache, reset for each batch. The weights are those of the model by hand, and what the trained model thinks of
    a text token by token is what it thinks of the whole."""
    model, other = deep_llama(), deep_llama()
    cache = kvplug.from_spec(SHARED + spec, model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other)]
    losses = []
    for step, rows in enumerate((2, 3, 1)):
        ids = models.tokens(rows, 16, seed=step)
        cache.reset()
        mine = loss_of(model(ids, **{NAME: cache}).logits, ids)
        theirs = loss_of(by_hand(other, ids, GROUPS), ids)
        losses.append((mine.item(), theirs.item()))
        for optimizer, loss in zip(optimizers, (mine, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert all(math.isclose(mine, theirs, rel_tol=1e-9) for mine, theirs in losses)
    start = dict(deep_llama().named_parameters())
    for (name, x), (_, y) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert (x - y).abs().max() < 1e-7, name
        assert (x - start[name]).abs().max() > 1e-4 or any(f"layers.{i}.self_attn" in name for i in BORROWERS), name
    model.eval()
    text = models.tokens(1, 8, seed=9)
    with torch.no_grad():
        whole = loss_of(by_hand(other, text, GROUPS), text).exp()
    cache.reset()
    steps = loss_of(feed(model, cache, text, [1] * 8), text).exp()
    assert math.isclose(steps, whole, rel_tol=0.1 if "int8" in spec else 1e-4)


def test_a_frozen_model_gives_plain_answers_in_grad_mode():
    """Nothing that requires a gradient: handles as in decoding."""
    model, ids = deep_llama().requires_grad_(False), models.tokens(2, 20)
    cache = kvplug.SharedCache(model, GROUPS, codec="int8")
    logits = model(ids, **{NAME: cache}).logits
    assert torch.allclose(logits, by_hand(model, ids, GROUPS), atol=1e-10, rtol=0)
    assert not logits.requires_grad


def test_gradient_checkpointing_is_refused_in_training():
    """transformers then runs its layers without a cache, so each would have its own keys and values."""
    model = deep_llama()
    switch = (
        "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    )
    getattr(model, f"{switch}_enable")()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM.*gradient checkpointing.*_disable\(\) is accepted"):
        kvplug.SharedCache(model, "cla2")
    assert model.config._attn_implementation == "sdpa"
    kvplug.SharedCache(model.config, "cla2")
    kvplug.SharedCache(model.eval(), "cla2")
    getattr(model.train(), f"{switch}_disable")()
    kvplug.SharedCache(model, "cla2")
