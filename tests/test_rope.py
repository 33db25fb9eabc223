"""Re-rotated keys against the model's own rotary embedding at the position they are moved to, and against a fresh
forward; norms stay, and no error builds up over hundreds of evictions.
"""

import pytest
import torch
import transformers
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvplug
from kvplug.rope import Rope
from tests import models
from tests.oracles import LOGITS, Keep, compact_logits, feed

# Angles of a few hundred radians in fp32 are off by 2**-16; the model's own are, ours are not.
ANGLES = 5e-5

MODELS = {
    **{name: lambda rope=rope: models.tiny_llama(rope_parameters=dict(rope)) for name, rope in models.ROPES.items()},
    "partial": models.tiny_phi,
    "interleaved": models.tiny_glm,
}


def rotated(model, x, positions):
    """`x` `[batch, heads, tokens, head_dim]` at `positions` `[batch or 1, tokens]`, by the model's own embedding."""
    cos, sin = model.model.rotary_emb(x, positions)
    if model.config.model_type == "glm":
        return apply_interleaved(x, x, cos, sin)[1]
    width = cos.shape[-1]
    return torch.cat([apply_rotary_pos_emb(x[..., :width], x[..., :width], cos, sin)[1], x[..., width:]], dim=-1)


def raw(batch=2, tokens=9):
    return torch.randn(batch, 2, tokens, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shift", [0, 1, 7, 300, -5])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_moved_key_is_the_key_of_the_other_position(make, shift):
    model = make()
    rope, x, positions = Rope.from_config(model.config), raw(), torch.arange(20, 29)[None]
    moved = rope.rotate(rotated(model, x, positions), shift)
    assert torch.allclose(moved, rotated(model, x, positions + shift), atol=ANGLES, rtol=0)
    if shift:
        assert not torch.allclose(moved, rotated(model, x, positions), atol=0.1, rtol=0)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_row_has_a_shift_of_its_own(make):
    model = make()
    rope, x, positions = Rope.from_config(model.config), raw(3), torch.arange(9)[None]
    shift = torch.tensor([4, 0, 111])
    moved = rope.rotate(rotated(model, x, positions), shift)
    expected = rotated(model, x, positions + shift[:, None])
    assert torch.allclose(moved, expected, atol=ANGLES, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_lengths_stay(make, dtype):
    rope, x = Rope.from_config(make().config), raw().to(dtype)
    moved = rope.rotate(x, 12_345)
    assert moved.dtype == dtype
    # One rounding of each channel to the dtype.
    assert torch.allclose(moved.float().norm(dim=-1), x.float().norm(dim=-1), rtol=torch.finfo(dtype).eps * 2, atol=0)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_two_hundred_small_moves_are_one_large_move(make):
    """Each rotation rounds once: 200 of them stay within 200 roundings, so a direct one has no drift to hide."""
    rope, x = Rope.from_config(make().config), raw()
    step = x
    for _ in range(200):
        step = rope.rotate(step, 1)
    assert torch.allclose(step, rope.rotate(x, 200), atol=200 * 2**-23 * 4, rtol=0)
    assert torch.allclose(rope.rotate(rope.rotate(x, 777), -777), x, atol=2**-21, rtol=0)


@pytest.mark.parametrize("shift", [2**20 + 1, 10**8 + 3])
def test_a_shift_of_millions_keeps_its_angle(shift):
    """Angles are taken in float64: in fp32 this shift would be off by whole radians."""
    model = models.tiny_llama()
    rope, x = Rope.from_config(model.config), raw()
    angle = (torch.tensor(shift, dtype=torch.float64) * model.model.rotary_emb.inv_freq.double()).repeat(2)
    swapped = torch.cat([-x[..., 8:], x[..., :8]], -1).double()
    expected = x.double() * angle.cos() + swapped * angle.sin()
    # inv_freq itself is a model's fp32 number, the same on both sides.
    for given in (shift, torch.tensor([shift, shift])):
        assert torch.allclose(rope.rotate(x, given).double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("rope", models.ROPES)
def test_two_hundred_evictions(rope):
    """One layer, one token at a time: the logits are those of a fresh forward over what is kept at compact positions,
    and the stored sinks are, bit for bit, those that came in."""
    make = lambda: models.tiny_llama(num_hidden_layers=1, rope_parameters=dict(models.ROPES[rope]))  # noqa: E731
    model, other, keep = make(), make(), Keep(sinks=3, window=9, compact=True)
    ids = models.tokens(1, 213)
    cache = kvplug.StreamingLLMCache(model, 3, 9)
    logits = [feed(model, cache, ids[:, :12], [12])[0]]
    first = cache.layers[0].keys[:, :, :3].clone()
    logits.append(feed(model, cache, ids[:, 12:], [1] * 201)[0])
    logits = torch.cat(logits)
    for seen in [*range(11, 20), 50, 100, 150, *range(205, 213)]:
        expected = compact_logits(other, ids, keep, seen)
        assert torch.allclose(logits[seen], expected, atol=LOGITS, rtol=0)
    assert torch.equal(cache.layers[0].keys[:, :, :3], first)


@pytest.mark.parametrize("rope", models.ROPES)
def test_original_positions_are_another_answer(rope):
    """The two kinds of positions differ by more than any tolerance, so neither test passes with the other's answer."""
    model = models.tiny_llama(num_hidden_layers=1, rope_parameters=dict(models.ROPES[rope]))
    ids = models.tokens(1, 100)
    compact, original = (
        feed(model, kvplug.StreamingLLMCache(model, 3, 9, positions=positions), ids, [12] + [1] * 88)[0, -1]
        for positions in ("compact", "original")
    )
    assert (compact - original).abs().max() > 100 * LOGITS


def test_yarn_s_factor_is_not_applied_twice():
    """Its attention factor is in the keys already; moving them by nothing must leave them as they are."""
    model = models.tiny_llama(rope_parameters=dict(models.ROPES["yarn"]))
    assert model.model.rotary_emb.attention_scaling != 1
    assert torch.equal(Rope.from_config(model.config).rotate(raw(), 0), raw())


REFUSED = {
    "dynamic": lambda: models.tiny_llama(
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ).config,
    "longrope": lambda: models.tiny_llama(
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8, "original_max_position_embeddings": 256,
        }
    ).config,
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2),
    "bloom": lambda: models.tiny_bloom().config,
}  # fmt: skip


@pytest.mark.parametrize("config", REFUSED.values(), ids=REFUSED)
def test_what_can_t_be_moved_raises(config):
    with pytest.raises(ValueError, match=r"re-rotated.*original"):
        Rope.from_config(config())


def test_a_rotation_that_the_config_only_seems_to_change():
    """Llama's default rotation ignores a partial factor in its config; so must what moves its keys."""
    rope = {**models.ROPES["default"], "partial_rotary_factor": 0.5}
    model = models.tiny_llama(rope_parameters=rope)
    width = 2 * len(model.model.rotary_emb.inv_freq)
    moved = Rope.from_config(model.config).rotate(rotated(model, raw(), torch.arange(9)[None]), 50)
    assert torch.allclose(moved, rotated(model, raw(), torch.arange(50, 59)[None]), atol=ANGLES, rtol=0), width
