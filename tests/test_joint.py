"""Layers that are stored together: what is stored of a prompt in every family, what is refused, and the search for
bases."""

import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import kvplug
from kvplug.joint import JointLayer
from kvplug.low_rank_plan import LowRankPlan
from tests import models
from tests.caches import low_rank_plan
from tests.joint_oracles import MergedTwin
from tests.oracles import NAME, feed
from tests.test_sharing_training import assert_alike, gradients, loss_of
from tests.walker import bytes_held

# Relative to the largest number: one rounding of the result, and one of a length to bfloat16 that may go the other way.
CLOSE = {torch.float32: 2**-8, torch.bfloat16: 2**-6}


def deep(layers=5, **settings):
    return models.tiny_llama(num_hidden_layers=layers, **settings)


def pairs(cache):
    """Layers that are stored together."""
    found = {}
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, JointLayer):
            found.setdefault(layer.group.number, []).append(i)
    return list(found.values())


# What is stored

FAMILIES = {
    "odd": (deep, 0, [[0, 1], [2, 3]]),
    "late": (deep, 2, [[2, 3]]),
    "half": (lambda: deep(6), None, [[3, 4]]),
    "one_group_of_heads": (lambda: deep(4, num_key_value_heads=1), 0, [[0, 1], [2, 3]]),
    "hybrid": (models.tiny_gemma3, 0, [[1, 3]]),
    "bfloat16": (lambda: deep(4).to(torch.bfloat16), 0, [[0, 1], [2, 3]]),
}


@pytest.mark.parametrize(("make", "start", "together"), FAMILIES.values(), ids=FAMILIES)
def test_what_is_stored_of_a_prompt(make, start, together):
    """Attention over a prompt is exact, so what every layer gets is what the default cache holds after it."""
    model, ids = make(), models.tokens(3, 40)
    own, cache = DynamicCache(config=model.config), kvplug.MiniCache(model, start, group_size=8, residual=5, sinks=2)
    assert pairs(cache) == together
    feed(model, own, ids, [40])
    feed(model, cache, ids, [40])
    merge, settled = MergedTwin(8, 2), 2 + (40 - 5 - 2) // 8 * 8
    for side in ("keys", "values"):
        expected = {i: getattr(layer, side) for i, layer in enumerate(own.layers)}
        for group in together:
            whole = torch.cat([expected[i] for i in group], dim=1)
            for row in whole:
                row[:, 2:settled] = merge(row[:, 2:settled])
            expected |= dict(zip(group, whole.chunk(2, dim=1), strict=True))
        for i, layer in enumerate(cache.layers):
            found, other = getattr(layer, side), expected[i]
            close = CLOSE[found.dtype] if any(i in group for group in together) else 0
            assert found.shape == other.shape
            assert (found - other).abs().max() <= close * other.abs().max(), (side, i)


def test_only_what_was_asked_for_is_merged():
    """Before `start`, and while tokens are few, nothing is lost."""
    model, ids = deep(), models.tokens(2, 30)
    own, cache = DynamicCache(config=model.config), kvplug.MiniCache(model, 3)
    for one in (own, cache):
        feed(model, one, ids, [20, 1, 9])
    for layer, other in zip(cache.layers, own.layers, strict=True):
        assert torch.allclose(layer.keys, other.keys, atol=1e-5, rtol=0)
        assert torch.allclose(layer.values, other.values, atol=1e-5, rtol=0)


def test_an_inner_codec_writes_every_layer():
    cache = kvplug.from_spec("minicache:start=2+int8", deep())
    assert [repr(layer).partition(",")[0] for layer in cache.layers[:2]] == ["KVLayer(int8)"] * 2
    assert pairs(cache) == [[2, 3]]


# Memory

SPECS = [
    "minicache:start=0", "minicache:start=0,distinct=1,group_size=8+int8:residual=6,sinks=2",
    "minicache:start=0,group_size=4+int4:residual=0,sinks=0", "lowrank:plan={plan}",
    "lowrank:plan={plan},rank=0.3,keys=1.0", "lowrank:plan={plan},keys=0.5+int8",
    "lowrank:plan={plan},rank=0.7+int4:group_size=8,residual=6,sinks=2",
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_plan_is_the_report(spec, dtype, tmp_path):
    model = models.tiny_llama()
    low_rank_plan(model).save(tmp_path / "plan")
    spec = spec.format(plan=tmp_path / "plan")
    for tokens in (0, 1, 8, 33, 38, 64, 257, 300):
        planned = kvplug.plan(model.config, spec, tokens, batch=3, dtype=dtype)
        for chunks in ([tokens], [tokens // 3, tokens - tokens // 3]):
            cache = kvplug.from_spec(spec, model)
            for chunk in filter(None, chunks):
                states = torch.randn(3, 2, chunk, 16).to(dtype)
                for layer in range(2):
                    cache.update(states, states, layer)
            if tokens:
                assert cache.memory() == planned, f"{tokens} tokens as {chunks}"
            assert planned.total == bytes_held(cache)


def test_two_layers_take_about_half():
    """For a token and head of both: a direction of 16 channels instead of 2, and of each its length (2 bytes), and for
    every 32 tokens its mean (2 bytes a channel), a distinct token (4 bytes a channel) and its place."""
    model = deep(2)
    cache = kvplug.MiniCache(model, 0, distinct=1, sinks=0, residual=0)
    feed(model, cache, models.tokens(1, 320), [320])
    report, each = cache.memory(), 16 * 4 + 2 * 2 + 2 * (16 * 2 + 16 * 4 + 1) / 32
    assert report.used == 2 * 2 * 320 * each
    assert report.used < 0.61 * report.dense_total


def test_memory_is_free_once_the_cache_is_gone():
    model = models.tiny_llama()
    gc.disable()
    try:
        for cache in (kvplug.MiniCache(model, 0), kvplug.LowRankCache(model, low_rank_plan(model))):
            feed(model, cache, models.tokens(2, 60), [50, 1, 9])
            gone = [weakref.ref(x) for layer in cache.layers for x in layer.store.tensors()]
            del cache
        assert gone
        assert not any(ref() is not None for ref in gone)
    finally:
        gc.enable()


# Training


@pytest.mark.parametrize("make", [lambda m: kvplug.MiniCache(m, 0), lambda m: kvplug.LowRankCache(m, low_rank_plan(m))])
def test_gradients_are_the_model_s_own(make):
    """Attention over one forward reads what came in."""
    model, ids = models.tiny_llama().double().train(), models.tokens(2, 60)
    expected = gradients(model, loss_of(model(ids, use_cache=False).logits, ids))
    assert_alike(gradients(model, loss_of(model(ids, **{NAME: make(model)}).logits, ids)), expected)


# What is refused

WRONG = {
    "start_-1": ({"start": -1}, ["start=-1", "index of a layer"]),
    "start_true": ({"start": True}, ["start=True", "index of a layer"]),
    "start_1.5": ({"start": 1.5}, ["start=1.5", "index of a layer"]),
    "start_too_deep": ({"start": 4}, ["start=4", "leaves 1 of", "0, 1, 2, 3, 4", "up to 3"]),
    "start_beyond": ({"start": 9}, ["start=9", "leaves 0 of", "up to 3"]),
    "distinct_0": ({"distinct": 0}, ["distinct=0"]),
    "distinct_33": ({"distinct": 33}, ["distinct=33"]),
    "distinct_true": ({"distinct": True}, ["distinct=True"]),
    "group_size_0": ({"group_size": 0}, ["group_size=0"]),
    "group_size_257": ({"group_size": 257}, ["group_size=257", "256"]),
    "codec": ({"codec": "int5"}, ["'int5'"]),
    "residual": ({"residual": -1}, ["residual=-1"]),
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(arguments, told):
    model = deep()
    with pytest.raises(ValueError) as caught:
        kvplug.MiniCache(model, **arguments)
    assert all(part in str(caught.value) for part in told), caught.value
    assert model.config._attn_implementation == "sdpa"


TOGETHER = {
    "minicache:start=0+window:window=8": "policy=",
    "minicache:start=0+h2o:budget=8": "policy=",
    "minicache:start=0+paged": "pool=",
    "minicache:start=0+shared:groups=cla2": "share=",
    "minicache:start=0+lowrank:plan={plan}": "both choose the joining",
    "minicache:begin=0": "'begin'",
    "minicache:start=x": "start='x'.*whole number",
    "lowrank": "lowrank:plan=FILE",
    "lowrank:plan={plan},rank=x": "rank='x'.*a number",
    "lowrank:plan={plan},rank=0": r"rank=0\.0.*up to the plan's 1\.0",
    "lowrank:plan={plan},rank=1.1": r"rank=1\.1.*up to the plan's 1\.0",
    "lowrank:plan={plan},keys=-1": r"keys=-1\.0",
}


@pytest.mark.parametrize(("spec", "told"), TOGETHER.items(), ids=TOGETHER)
def test_what_can_t_be_had_together_says_why(spec, told, tmp_path):
    model = models.tiny_llama()
    low_rank_plan(model).save(tmp_path / "plan")
    with pytest.raises(ValueError, match=told):
        kvplug.from_spec(spec.format(plan=tmp_path / "plan"), model)
    assert model.config._attn_implementation == "sdpa"


def test_layers_that_lie_apart_are_named():
    """As where a model is spread over devices, which a test has no two of."""
    cache = kvplug.MiniCache(models.tiny_llama(), 0)
    cache.update(torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), 0)
    far = torch.randn(1, 2, 3, 16, device="meta")
    with pytest.raises(ValueError, match=r"key_states is on meta, and the layers .* are on cpu"):
        cache.update(far, far, 1)
    assert not cache.layers[1].is_initialized


# The search for bases


def own_states(model, rows):
    """What the model gives the default cache for each text, by side and layer, without the first 4 tokens of each."""
    caches = []
    for row in rows:
        caches.append(DynamicCache(config=model.config))
        feed(model, caches[-1], row[None], [len(row)])

    def states(side, layer):
        return torch.cat([getattr(c.layers[layer], side)[0, :, 4:] for c in caches], dim=1).double()

    return states


@pytest.fixture(scope="module")
def rows():
    return list(models.tokens(3, 100))


def test_the_bases_are_those_of_a_singular_value_decomposition(rows):
    model = deep()
    states = own_states(model, rows)
    plan = kvplug.calibrate_low_rank(model, rows, 0.5, group=2, progress=False)
    assert plan.groups == [[0, 1], [2, 3], [4]]
    for side in ("keys", "values"):
        for group, basis in zip(plan.groups, plan.bases[side], strict=True):
            x = torch.cat([states(side, layer) for layer in group])  # heads, tokens, head_dim
            flat = x.transpose(0, 1).flatten(1)
            assert basis.shape == (len(x), flat.shape[1] // 2, 16)
            found = basis.double().transpose(0, 1).flatten(1)
            assert torch.allclose(found @ found.T, torch.eye(len(found), dtype=torch.float64), atol=1e-5)
            sizes = torch.linalg.svdvals(flat)
            for count in (1, 5, len(found)):
                left = flat - flat @ found[:count].T @ found[:count]
                assert left.norm() == pytest.approx(sizes[count:].norm().item(), rel=1e-4)


@pytest.mark.parametrize("make", [lambda: deep(3), models.tiny_deepseek, models.tiny_gemma3n, models.tiny_falcon])
def test_all_directions_lose_nothing(rows, make):
    """Latents, too, whose keys and values are of different widths."""
    model, ids = make(), models.tokens(2, 60, seed=5)
    plan = kvplug.calibrate_low_rank(model, rows, 1.0, group=3, progress=False)
    cache = kvplug.LowRankCache(model, plan, 1.0, keys=1.0, residual=0, sinks=0)
    own = DynamicCache(config=model.config)
    answers = [feed(model, one, ids, [40, 1, 19]) for one in (cache, own)]
    assert (answers[0] - answers[1]).abs().max() < 1e-4
    assert all(layer.store.encoded.length > 0 for layer in cache.layers if isinstance(layer, JointLayer))
    assert any(isinstance(layer, JointLayer) for layer in cache.layers)


def test_fewer_directions_lose_more(rows):
    """On the text that the bases are of: the part of the squares that is lost, whatever the directions are."""
    model = deep(2)
    states = own_states(model, rows[:1])
    plan, lost = kvplug.calibrate_low_rank(model, rows[:1], 1.0, group=2, progress=False), []
    for rank in (0.25, 0.5, 0.75):
        cache = kvplug.LowRankCache(model, plan, rank, residual=0, sinks=4)
        feed(model, cache, rows[0][None], [100])
        lost.append(
            sum(((layer.values[0, :, 4:] - states("values", i)) ** 2).sum() for i, layer in enumerate(cache.layers))
        )
        assert all(
            torch.allclose(layer.keys[0, :, 4:].double(), states("keys", i)) for i, layer in enumerate(cache.layers)
        )
    assert lost[0] > lost[1] > lost[2] > 0


def test_a_model_is_left_as_it_was(rows):
    model = deep(2).train()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    kvplug.calibrate_low_rank(model, rows, progress=False)
    assert model.training
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(x.grad is None for x in model.parameters())


BAD = {
    "rank_0": ({"rank": 0}, ["rank=0", "up to 1"]),
    "rank_1.5": ({"rank": 1.5}, ["rank=1.5", "up to 1"]),
    "rank_true": ({"rank": True}, ["rank=True"]),
    "rank_text": ({"rank": "half"}, ["rank='half'"]),
    "group_0": ({"group": 0}, ["group=0"]),
    "tokens_7": ({"tokens": 7}, ["tokens=7"]),
    "texts_empty": ({"texts": []}, ["texts=[]"]),
    "texts_string": ({"texts": "words"}, ["texts='words'"]),
    "texts_short": ({"texts": [torch.arange(20)]}, ["16 tokens", "channels", "at least as many"]),
    "texts_floats": ({"texts": [torch.randn(40)]}, ["texts[0]"]),
    "model": ({"model": models.tiny_llama().config}, ["model=LlamaConfig"]),
}


@pytest.mark.parametrize(("arguments", "told"), BAD.values(), ids=BAD)
def test_a_search_that_can_t_be_is_refused(rows, tmp_path, arguments, told):
    arguments = {"model": deep(4), "texts": rows, "path": tmp_path / "plan", **arguments}
    with pytest.raises(ValueError) as caught:
        kvplug.calibrate_low_rank(**arguments)
    assert all(part in str(caught.value) for part in told), caught.value
    assert not list(tmp_path.iterdir())


# Files


def test_a_plan_comes_back_from_its_file(rows, tmp_path):
    model, path = deep(4), tmp_path / "plan.safetensors"
    plan = kvplug.calibrate_low_rank(model, rows, 0.5, group=2, path=path, progress=False)
    loaded = LowRankPlan.load(path)
    assert (loaded.groups, loaded.rank, loaded.model) == (plan.groups, plan.rank, plan.model)
    for side in ("keys", "values"):
        assert all(torch.equal(a, b) for a, b in zip(loaded.bases[side], plan.bases[side], strict=True))
    ids = models.tokens(2, 60)
    answers = [feed(model, kvplug.LowRankCache(model, p, 0.3), ids, [50, 10]) for p in (plan, path, str(path))]
    assert torch.equal(answers[0], answers[1])
    assert torch.equal(answers[0], answers[2])


def test_a_plan_of_another_model_is_refused():
    plan = low_rank_plan(models.tiny_llama())
    for other, told in (
        (deep(3), "num_hidden_layers is 2 there and 3 here"),
        (models.tiny_llama(seed=1), "its weights are not"),
    ):
        with pytest.raises(ValueError, match=f"another model: .*{told}"):
            kvplug.LowRankCache(other, plan)
        assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("plan", [5, None, [[0, 1]]])
def test_what_is_no_plan_is_named(plan):
    with pytest.raises(ValueError, match=r"plan=.*is not accepted; what kvplug\.calibrate_low_rank returned"):
        kvplug.LowRankCache(models.tiny_llama(), plan)


def test_files_of_other_kinds_are_refused(tmp_path):
    model = models.tiny_llama()
    with pytest.raises(FileNotFoundError):
        kvplug.LowRankCache(model, tmp_path / "nothing")
    cache = kvplug.DenseCache(model)
    feed(model, cache, models.tokens(1, 5), [5])
    cache.save(tmp_path / "cache")
    (tmp_path / "text").write_text("words")
    low_rank_plan(model).save(tmp_path / "cut")
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-10])
    for name in ("cache", "text", "cut"):
        with pytest.raises(ValueError, match=f"{name}.*calibrate_low_rank wrote is accepted"):
            kvplug.LowRankCache(model, tmp_path / name)
    low_rank_plan(model).save(tmp_path / "plan")
    with pytest.raises(ValueError, match=r"plan.*save"):
        kvplug.load(tmp_path / "plan", model)
