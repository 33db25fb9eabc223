"""A model whose latent attention is absorbed against its own attention with transformers' own cache."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvplug
from kvplug.kernels import latent
from tests import models
from tests.oracles import LOGITS, NAME, Keep, feed, masked_logits

LATENT = {
    **{name: value for name, value in models.TINY.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
YARN = {**models.ROPES["yarn"], "mscale": 1.0, "mscale_all_dim": 0.5}
FAMILIES = {
    "DeepseekV3": {"rope_parameters": YARN},
    "DeepseekV2": {"topk_method": "greedy"},
    "MiniCPM3": {},
    "Youtu": {},
    "Glm4MoeLite": {},
    "LongcatFlash": {"num_layers": 1, "zero_expert_num": 1, "ffn_hidden_size": 64, "expert_ffn_hidden_size": 32}
    | {"moe_topk": 2, "head_dim": 8},
    "KimiLinear": {"layer_types": ["linear_attention", "full_attention"]}
    | {"linear_num_heads": 2, "linear_head_dim": 16},
}
CHUNKS = [12, 5, *[1] * 8]
SPECS = ["dense", "fp8", "int8", "int4", "int4:group_size=8,residual=8,sinks=1", "int3:residual=0", "paged"]
SPECS += ["int8+paged:page_size=4"]


def build(family="DeepseekV3", **changes):
    config = getattr(transformers, f"{family}Config")(**{**LATENT, **FAMILIES[family], **changes})
    return models.build(getattr(transformers, f"{family}ForCausalLM"), config)


@pytest.fixture
def expansions(monkeypatch):
    """How many queries each call of the absorbed kernel had."""
    calls, attend = [], latent.attend

    def counting(query, *args, **kwargs):
        calls.append(query.shape[2])
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(latent, "attend", counting)
    return calls


def twice(model, make, ids, mask=None, chunks=CHUNKS):
    """Logits of a model with its own attention and once it is absorbed, each through a cache of its own."""
    with torch.no_grad():
        own = feed(model, make(model), ids, chunks, mask)
        kvplug.absorb(model)
        return own, feed(model, make(model), ids, chunks, mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_answers_as_with_its_own_attention(family, expansions):
    model, ids = build(family), models.tokens(2, sum(CHUNKS))
    with torch.no_grad():
        expected = feed(model, DynamicCache(config=model.config), ids, CHUNKS)
        kvplug.absorb(model)
        assert torch.equal(feed(model, DynamicCache(config=model.config), ids, CHUNKS), expected)
        assert not expansions
        result = feed(model, kvplug.DenseCache(model), ids, CHUNKS)
    layers = sum("kv_b_proj.weight" in name for name in model.state_dict())
    # The prompt is the model's own; with these widths what comes after it is cheaper on the latents.
    assert expansions == [count for count in CHUNKS[1:] for _ in range(layers)]
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left_padded"])
def test_each_cache_answers_as_with_the_model_s_own_attention(spec, padded):
    ids, mask = models.tokens(2, sum(CHUNKS)), None
    if padded:
        _, ids, mask = models.left_padded([sum(CHUNKS), sum(CHUNKS) - 9])
    own, result = twice(build(), lambda model: kvplug.from_spec(spec, model), ids, mask)
    real = slice(None) if mask is None else mask.bool()
    assert torch.allclose(result[real], own[real], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_each_attention_function_is_replaced(attention):
    model = build()
    model.set_attn_implementation(attention)
    own, result = twice(model, kvplug.DenseCache, models.tokens(2, sum(CHUNKS)))
    assert torch.allclose(result, own, atol=LOGITS, rtol=0)


def test_half_precision():
    model = build().to(torch.bfloat16)
    own, result = twice(model, kvplug.DenseCache, models.tokens(2, sum(CHUNKS)))
    # 2**-9 of scores of size 20 in both ways, carried through two layers into logits of size 6.
    assert (result - own).abs().mean() < 0.05


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
@pytest.mark.parametrize("spec", ["dense", "int8", "paged"])
def test_generated_tokens_are_the_same(spec, options):
    model = build()
    _, ids, mask = models.left_padded([9, 14])
    made = []
    for _ in range(2):
        cache = kvplug.from_spec(spec, model)
        made.append(model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12,
                                   do_sample=False, **options))  # fmt: skip
        kvplug.absorb(model)
    assert torch.equal(*made)


def test_a_chunk_that_is_cheaper_expanded_is_expanded(expansions):
    model, ids = build(), models.tokens(1, 140)
    # 24 * 24 < 100 * (2 * 24 + 8 - 24 - 8): the first forward of a cache that encodes, and the second.
    own, result = twice(model, lambda m: kvplug.QuantCache(m, "int8"), ids, chunks=[100, 39, 1])
    assert expansions == [1, 1]
    assert torch.allclose(result, own, atol=LOGITS, rtol=0)


# Eviction over latents


@pytest.mark.parametrize(
    ("spec", "keep"),
    [
        ("window:window=9", Keep(window=9)),
        ("streaming:sinks=2,window=7,positions=original", Keep(sinks=2, window=7)),
        ("streaming:sinks=2,window=7,positions=original+paged:page_size=4", Keep(sinks=2, window=7)),
    ],
    ids=["window", "streaming", "streaming_paged"],
)
def test_positions_may_be_dropped(spec, keep):
    model, ids = build(), models.tokens(1, sum(CHUNKS))
    expected = masked_logits(model, ids, CHUNKS, keep)
    kvplug.absorb(model)
    with torch.no_grad():
        result = feed(model, kvplug.from_spec(spec, model), ids, CHUNKS)
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


def heavy_hitters(model, ids, chunks, budget, recent):
    """Logits of a one-layer model, in full forwards under a mask: of old tokens those with the most attention stay."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    total = ids.shape[1]
    visible, scores, kept, start = torch.zeros(total, total, dtype=torch.bool), torch.zeros(total), [], 0
    for count in chunks:
        end = start + count
        visible[start:end, kept] = True
        visible[start:end, start:end] = torch.ones(count, count).tril().bool()
        mask = torch.zeros(1, 1, total, total).masked_fill_(~visible, torch.finfo(torch.float32).min)
        with torch.no_grad():
            out = model(ids, attention_mask=mask, use_cache=False, output_attentions=True)
        scores += out.attentions[0][0, :, start:end].sum(1).mean(0)
        old = [token for token in [*kept, *range(start, end)] if token < end - recent]
        old.sort(key=lambda token: -scores[token])
        kept = sorted(old[: budget - recent]) + list(range(max(end - recent, 0), end))
        start = end
    return out.logits


@pytest.mark.parametrize("heads", ["uniform", "adaptive"])
def test_heavy_hitters_among_latents(heads):
    model, ids = build(num_hidden_layers=1), models.tokens(1, sum(CHUNKS))
    expected = heavy_hitters(model, ids, CHUNKS, budget=8, recent=3)
    kvplug.absorb(model)
    cache = kvplug.H2OCache(model, budget=8, recent=3, sinks=0, heads=heads)
    with torch.no_grad():
        result = feed(model, cache, ids, CHUNKS)
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("spec", ["snapkv:budget=8,observe=4", "tova:budget=8", "keydiff:budget=8", "knorm:budget=8"])
def test_both_ways_show_a_policy_the_same(spec, monkeypatch):
    """Padded rows too: what is expanded for many queries is what the latents give for few."""
    model = build()
    kvplug.absorb(model)
    _, ids, mask = models.left_padded([sum(CHUNKS), sum(CHUNKS) - 6])
    found = []
    for always in (True, False):
        monkeypatch.setattr(latent.Latents, "pays", lambda self, query, always=always: always)
        with torch.no_grad():
            found.append(feed(model, kvplug.from_spec(spec, model), ids, CHUNKS, mask)[mask.bool()])
    assert torch.allclose(*found, atol=LOGITS, rtol=0)


def test_a_plan_knows_that_an_absorbed_model_can_drop():
    model = build()
    with pytest.raises(ValueError, match=r"expands the latents.*absorb"):
        kvplug.plan(model, "window:window=8", tokens=20)
    kvplug.absorb(model)
    cache = kvplug.WindowCache(model, 8)
    with torch.no_grad():
        feed(model, cache, models.tokens(1, 20), [20])
    assert cache.memory() == kvplug.plan(model, "window:window=8", tokens=20)


# What must not change


def test_without_a_cache_of_ours_all_is_as_before(expansions):
    model, ids = build(), models.tokens(2, 9)
    kvplug.DenseCache(model)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        made = model.generate(ids, max_new_tokens=5)
        kvplug.absorb(model)
        assert torch.equal(model(ids, use_cache=False).logits, expected)
        assert torch.equal(model.generate(ids, max_new_tokens=5), made)
    assert not expansions


def test_a_model_that_is_not_routed_expands():
    model, ids = build(), models.tokens(2, sum(CHUNKS))

    def make(model):
        cache = kvplug.QuantCache(model, "int8")
        kvplug.detach(model)
        return cache

    own, result = twice(model, make, ids)
    assert torch.equal(result, own)


def test_gradients_are_those_of_the_model_s_own_way(expansions):
    model, ids = build(), models.tokens(1, 12)
    found = []
    for _ in range(2):
        cache = kvplug.DenseCache(model)
        with torch.no_grad():
            model(ids[:, :9], **{NAME: cache})
        model.zero_grad()
        model(ids[:, 9:], **{NAME: cache}).logits.sum().backward()
        found.append(model.model.layers[0].self_attn.kv_b_proj.weight.grad.clone())
        kvplug.absorb(model)
    assert not expansions
    assert found[0].abs().max() > 0
    assert torch.equal(*found)


def test_dropout_goes_to_the_model_s_own_way(expansions):
    model = build(attention_dropout=0.5)
    kvplug.absorb(model)
    cache = kvplug.QuantCache(model, "int8")
    with torch.no_grad():
        feed(model.train(), cache, models.tokens(1, 12), [9, 3])
    assert not expansions


def test_weights_are_views_and_may_change(expansions):
    # Experts can't run in double precision.
    model, ids = build(first_k_dense_replace=2), models.tokens(1, sum(CHUNKS))
    kvplug.absorb(model)
    before = sum(x.numel() for x in model.state_dict().values())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.kv_b_proj.weight.mul_(1.5)
        expected = feed(model, DynamicCache(config=model.config), ids, CHUNKS)
        result = feed(model, kvplug.DenseCache(model), ids, CHUNKS)
        assert torch.allclose(result, expected, atol=LOGITS, rtol=0)
        result = feed(model.double(), kvplug.DenseCache(model), ids, CHUNKS)
    assert torch.allclose(result.float(), expected, atol=LOGITS, rtol=0)
    assert expansions
    assert sum(x.numel() for x in model.state_dict().values()) == before


def test_a_projection_that_is_replaced_later_is_used(expansions):
    model, ids = build(), models.tokens(1, sum(CHUNKS))
    kvplug.absorb(model)

    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Doubled
    with torch.no_grad():
        expected = feed(model, DynamicCache(config=model.config), ids, CHUNKS)
        result = feed(model, kvplug.DenseCache(model), ids, CHUNKS)
    assert not expansions
    assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copied, pickled, saved])
def test_a_copy_is_absorbed_and_on_its_own(how, expansions):
    model, ids = build(), models.tokens(1, sum(CHUNKS))
    kvplug.absorb(model)
    other = how(model)
    with torch.no_grad():
        expected = feed(model, kvplug.DenseCache(model), ids, CHUNKS)
        for parameter in model.parameters():
            parameter.zero_()
            gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None
        expansions.clear()
        assert torch.equal(feed(other, kvplug.DenseCache(other), ids, CHUNKS), expected)
        assert expansions
        feed(other, DynamicCache(config=other.config), ids, CHUNKS)


def test_what_is_saved_is_the_model(tmp_path):
    model = build()
    names = set(model.state_dict())
    kvplug.absorb(model)
    assert set(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in loaded.state_dict().items())


def test_absorbing_is_undone_and_can_be_said_twice(expansions):
    model, ids = build(), models.tokens(1, 12)
    before = [dict(vars(module)) for module in model.modules()]
    kvplug.unabsorb(model)
    kvplug.absorb(model)
    kvplug.absorb(model)
    kvplug.unabsorb(model)
    assert [dict(vars(module)) for module in model.modules()] == before
    with torch.no_grad():
        feed(model, kvplug.DenseCache(model), ids, [9, 3])
    assert not expansions


# What is refused


def test_a_model_without_latent_attention_is_refused():
    with pytest.raises(ValueError, match=r"model=LlamaForCausalLM has no latent.*accepted.*expand_kv"):
        kvplug.absorb(models.tiny_llama())
    for function in (kvplug.absorb, kvplug.unabsorb):
        with pytest.raises(ValueError, match="model=str is not accepted"):
            function("deepseek")
    with pytest.raises(ValueError, match="model=DeepseekV3Config is not accepted"):
        kvplug.absorb(build().config)


def test_sparse_attention_is_refused():
    config = transformers.DeepseekV32Config(**LATENT)
    with pytest.raises(ValueError, match=r"DeepseekV32ForCausalLM.*layers\.0\.self_attn.*sparse.*is accepted"):
        kvplug.absorb(transformers.DeepseekV32ForCausalLM(config))


class Adapted(torch.nn.Linear):
    """What an adapter or a quantised layer looks like: its weight isn't all that it does."""


def with_bias(module):
    module.kv_b_proj = torch.nn.Linear(24, 4 * 24, bias=True)


def adapted(module):
    module.kv_b_proj = Adapted(24, 4 * 24, bias=False)


def scaled(module):
    expand = type(module).expand_kv

    class Scaled(type(module)):
        def expand_kv(self, kv_nope, k_rot):
            keys, values = expand(self, kv_nope, k_rot)
            return keys, values * 1.1

    module.__class__ = Scaled


@pytest.mark.parametrize(
    ("change", "told"), [(with_bias, "with a bias"), (adapted, "Adapted"), (scaled, "in another way")]
)
def test_projections_that_cant_be_absorbed_are_refused(change, told):
    model = build()
    change(model.model.layers[1].self_attn)
    with pytest.raises(ValueError, match=rf"DeepseekV3ForCausalLM.*layers\.1\.self_attn.*{told}.*accepted"):
        kvplug.absorb(model)
    # All or nothing.
    assert "expand_kv" not in vars(model.model.layers[0].self_attn)
