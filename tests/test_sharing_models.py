"""Models that share by themselves: Gemma 3n and Gemma 4 hand on to later layers what the cache shows of an earlier one,
Gemma 4 to the last queries alone. The layer must not change before the last of them has attended.
"""

import pytest
import torch
from transformers import DynamicCache, StaticCache

import kvplug
from kvplug.layer import KVLayer
from tests import models
from tests.caches import keep
from tests.oracles import NAME, feed, visibility
from tests.walker import bytes_held

KINDS = [f"{'full' if i in (2, 4, 6) else 'sliding'}_attention" for i in range(7)]
FAMILIES = {
    "gemma3n": lambda **kw: models.tiny_gemma3n(
        num_hidden_layers=7, num_kv_shared_layers=4, activation_sparsity_pattern=[0.0] * 7, layer_types=KINDS, **kw
    ).double(),
    # A rotation that can be moved, for all policies.
    "gemma4": lambda **kw: models.tiny_gemma4(
        rope_parameters=dict.fromkeys(KINDS, models.ROPES["default"]), **kw
    ).double(),
}
CHUNKS = [12, 1, 1, 7, 1]
# Two orders of summation in float64; and the same with what kvplug computes in fp32.
EXACT, CLOSE = 1e-10, 1e-4

every = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def default(model):
    return DynamicCache(config=model.config)


@torch.no_grad()
def masked(model, ids, full):
    """One forward of transformers over `ids` `[1, tokens]`, its full layers under a mask of its own."""
    total = ids.shape[1]
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    near = causal & ~causal.tril(-model.config.sliding_window)
    masks = {
        name: torch.zeros(1, 1, total, total, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)
        for name, seen in (("full_attention", full), ("sliding_attention", near))
    }
    return model(ids, attention_mask=masks, **{NAME: default(model)}).logits


@every
def test_the_oracle_is_the_model(family):
    model, ids = family(), models.tokens(1, 22)
    causal = torch.ones(22, 22, dtype=torch.bool).tril()
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert torch.allclose(masked(model, ids, causal), expected, atol=EXACT, rtol=0)
    assert (masked(model, ids, causal & ~causal.tril(-4)) - expected).abs().max() > 0.1


ROOM = {
    "dense": "dense",
    "paged": "paged:page_size=3",
    "window": "window:window=64",
    "h2o": "h2o:budget=64",
}


@pytest.mark.parametrize("spec", ROOM.values(), ids=ROOM)
@every
def test_with_room_the_answers_are_the_default_cache_s(family, spec):
    model, other = family(), family()
    for ids, mask, chunks in (
        (models.tokens(2, 22), None, CHUNKS),
        (*models.left_padded([5, 22, 9])[1:], [20, 1, 1]),
    ):
        expected = feed(other, default(other), ids, chunks, mask)
        result = feed(model, kvplug.from_spec(spec, model), ids, chunks, mask)
        real = slice(None) if mask is None else mask.bool()
        assert torch.allclose(result[real], expected[real], atol=CLOSE, rtol=0)


@pytest.mark.parametrize("spec", ROOM.values(), ids=ROOM)
@every
def test_with_room_generate_gives_the_default_cache_s_tokens(family, spec):
    """generate wants the logits of the last token alone, so Gemma 4 gives its last layers one query of the prompt."""
    _, ids, mask = models.left_padded([5, 14, 9])
    more = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    expected = family().generate(ids, **more)
    model = family()
    assert model.generate(ids, **more, **{NAME: kvplug.from_spec(spec, model)}).equal(expected)


KEPT = {
    "window": ("window:window=8", keep(window=8)),
    "streaming": ("streaming:sinks=2,window=6,positions=original", keep(sinks=2, window=6)),
    "paged_window": ("window:window=8+paged:page_size=3", keep(window=8)),
}


@pytest.mark.parametrize("chunks", [CHUNKS, [5] * 4 + [2]], ids=str)
@pytest.mark.parametrize(("spec", "kept"), KEPT.values(), ids=KEPT)
@every
def test_a_window_is_one_forward_under_its_mask(family, spec, kept, chunks):
    model, ids = family(), models.tokens(1, 22)
    expected = masked(family(), ids, visibility(chunks, kept))
    cache = kvplug.from_spec(spec, model)
    assert torch.allclose(feed(model, cache, ids, chunks), expected, atol=CLOSE, rtol=0)
    assert [layer.keys.shape[2] for layer in cache.layers if isinstance(layer, KVLayer)] == [8]


@pytest.mark.parametrize("spec", ["dense", "paged:page_size=3", "int8", "window:window=8", "snapkv:budget=64"])
@every
def test_the_last_logits_alone(family, spec):
    """Those of all tokens are the oracle of the last ones, by the same cache. A policy sees fewer queries then."""
    model, ids = family(), models.tokens(1, 22)
    for chunks in ([22], [12, 10]):
        expected = feed(model, kvplug.from_spec(spec, model), ids, chunks)
        for last in (1, 3):
            cache = kvplug.from_spec(spec, model)
            with torch.no_grad():
                for step in ids.split(chunks, dim=1):
                    result = model(step, logits_to_keep=last, **{NAME: cache}).logits
            assert torch.allclose(result, expected[:, -last:], atol=CLOSE, rtol=0)
            if not spec.startswith("snapkv"):
                more, past = models.tokens(1, 2, seed=4), kvplug.from_spec(spec, model)
                feed(model, past, ids, chunks)
                assert torch.allclose(*(feed(model, c, more, [2]) for c in (cache, past)), atol=CLOSE, rtol=0)


@every
def test_the_last_logits_alone_without_a_cache(family):
    """A model that a cache was made for answers without one as before."""
    model, ids = family(), models.tokens(2, 22)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -3:]
        kvplug.attach(model)
        assert torch.allclose(model(ids, use_cache=False, logits_to_keep=3).logits, expected, atol=EXACT, rtol=0)
        for last in (0, 3):
            cache = StaticCache(config=model.config, max_cache_len=32)
            result = model(ids, logits_to_keep=last, **{NAME: cache}).logits[:, -3:]
            assert torch.allclose(result, expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("spec", ["dense", "int8"])
@every
def test_the_last_logits_of_a_model_in_training(family, spec):
    ids, results = models.tokens(1, 12), []
    for last in (0, 3):
        model = family().train()
        out = model(ids, logits_to_keep=last, **{NAME: kvplug.from_spec(spec, model)}).logits[:, -3:]
        out.pow(2).sum().backward()
        results.append((out.detach(), model.model.layers[2].self_attn.k_proj.weight.grad))
    for whole, part in zip(*results, strict=True):
        assert torch.allclose(whole, part, atol=1e-8, rtol=1e-8)


@every
def test_an_eight_bit_cache_is_close_and_counts_once(family):
    """The prompt is exact; the last tokens then differ by far less than those of another prompt."""
    model, other = family(), family()
    ids, wrong = models.tokens(2, 14), models.tokens(2, 14, seed=1)
    wrong[:, -1] = ids[:, -1]
    full = feed(other, default(other), ids, [13, 1])
    cache = kvplug.QuantCache(model, "int8")
    result = feed(model, cache, ids, [13, 1])
    assert torch.allclose(result[:, :13], full[:, :13], atol=CLOSE, rtol=0)
    distance = (feed(other, default(other), wrong, [13, 1]) - full)[:, 13].abs().amax()
    assert 0 < (result - full)[:, 13].abs().amax() < distance / 4
    assert cache.memory().total == bytes_held(cache)
    assert cache.memory() == kvplug.plan(model.config, "int8", 14, batch=2, dtype=torch.float64)


@pytest.mark.parametrize(
    "spec",
    [
        "h2o:budget=8",
        "tova:budget=8",
        "expected_attention:budget=8,future=4",
        "h2o:budget=8,heads=adaptive",
        "h2o:budget=8+int4+paged:page_size=3",
    ],
)
@every
def test_a_budget_holds_after_every_forward(family, spec):
    """And what the prompt sees is all of it; a step sees what the layers together kept."""
    model, other, ids = family(), family(), models.tokens(2, 22)
    cache = kvplug.from_spec(spec, model)
    expected = feed(other, default(other), ids, [22])
    for start, end in ((0, 12), (12, 13), (13, 20), (20, 22)):
        result = feed(model, cache, ids[:, start:end], [end - start])
        if start == 0:
            assert torch.allclose(result, expected[:, :12], atol=CLOSE, rtol=0)
        assert cache.memory().tokens_kept == 8
        assert cache.memory().total == bytes_held(cache)
        assert all(layer.unfinished == 0 for layer in cache.layers if isinstance(layer, KVLayer))
    made = model.generate(ids, max_new_tokens=6, do_sample=False, **{NAME: kvplug.from_spec(spec, model)})
    assert made.shape == (2, 28)


@every
def test_the_votes_are_those_of_all_layers(family):
    """H2O, after one forward: what was paid to a token by the layer that owns and by those that its keys are handed on
    to, as eager attention tells it."""
    ids = models.tokens(1, 16)
    model = family()
    cache = kvplug.H2OCache(model, 6, recent=2, sinks=1)
    feed(model, cache, ids, [16])
    eager = family()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids, output_attentions=True, **{NAME: default(eager)}).attentions
    paid = (
        torch.stack([weights[i][0] for i in (2, 4, 6)]).unflatten(1, (2, 2)).mean((0, 2)).sum(1)
    )  # [kv_heads, tokens]
    store = cache.layers[2].store
    for head in range(2):
        best = paid[head].clone()
        best[[0, 14, 15]] = torch.inf
        kept = best.topk(6).indices.sort().values
        positions, order = store.positions[0, head].sort()
        assert positions.long().equal(kept)
        assert torch.allclose(store.scores[0, head][order].double(), paid[head][kept], atol=1e-4, rtol=0)


@every
def test_a_saved_cache_goes_on(family, tmp_path):
    """What was loaded waits for all readers too."""
    model, ids = family(), models.tokens(2, 22)
    cache = kvplug.from_spec("h2o:budget=8", model)
    feed(model, cache, ids[:, :13], [12, 1])
    cache.save(tmp_path / "cache")
    twin = kvplug.load(tmp_path / "cache", model)
    for more, steps in ((ids[:, 13:], [7, 1, 1]), (ids[:, :6], [6])):
        assert torch.equal(feed(model, twin, more, steps), feed(model, cache, more, steps))


@every
def test_sharing_on_top_of_it_is_refused(family):
    """Its full layers that own: one, so there is none to share with."""
    model = family()
    with pytest.raises(ValueError, match=r"groups=\[\[2, 4\]\].*layer 4.*accepted: 2$"):
        kvplug.SharedCache(model, [[2, 4]])
    with pytest.raises(ValueError, match=r"groups=\[\[0, 2\]\].*layer 0.*accepted: 2$"):
        kvplug.SharedCache(model, [[0, 2]])


def test_a_hybrid_model_shares_its_full_layers():
    """Sliding layers keep transformers' own; of the full ones the second reads the first."""
    model, ids = models.tiny_gemma3().double(), models.tokens(2, 22)
    cache = kvplug.SharedCache(model, "cla2")
    assert repr(cache.layers[3]) == "BorrowedLayer(of layer 1)"
    result = feed(model, cache, ids, CHUNKS)

    class Lent(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            if layer_idx != 3:
                shown = super().update(key_states, value_states, layer_idx, *args, **kwargs)
                self.shown = shown if layer_idx == 1 else self.shown if layer_idx else None
                return shown
            return self.shown

    other = models.tiny_gemma3().double()
    expected = feed(other, Lent(config=other.config), ids, CHUNKS)
    assert torch.allclose(result, expected, atol=EXACT, rtol=0)
    assert cache.memory().total == bytes_held(cache)
    with pytest.raises(ValueError, match=r"layer 0 is not a full-attention layer; accepted: 1, 3"):
        kvplug.SharedCache(model, [[0, 1]])
