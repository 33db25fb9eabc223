"""Which layers share, as a user says it; what sharing saves, to the byte; and what is refused without a trace."""

import copy
import json
import pickle

import pytest
import torch
import transformers
from transformers import DynamicCache

import kvplug
from kvplug.fingerprint import fingerprint
from kvplug.policies import Window
from kvplug.sharing import BorrowedLayer, groups, owners
from kvplug.sharing_plan import SharingPlan
from tests import models
from tests.oracles import feed
from tests.walker import bytes_held


@pytest.fixture
def deep():
    return models.tiny_llama(num_hidden_layers=5)


def borrowed(cache):
    return {i: layer.index for i, layer in enumerate(cache.layers) if isinstance(layer, BorrowedLayer)}


MEANT = {
    "cla2": {1: 0, 3: 2},
    "cla3": {1: 0, 2: 0, 4: 3},
    "cla5": {1: 0, 2: 0, 3: 0, 4: 0},
    "cla9": {1: 0, 2: 0, 3: 0, 4: 0},
    "yoco": {3: 2, 4: 2},
    "0-3/1-2-4": {3: 0, 2: 1, 4: 1},
    "2": {},
}


@pytest.mark.parametrize(("said", "meant"), MEANT.items(), ids=MEANT)
def test_groups_by_name_and_by_list(deep, said, meant):
    spec = f"shared:groups={said}"
    listed = [[int(i) for i in g.split("-")] for g in said.split("/")] if said[0].isdecimal() else said
    assert borrowed(kvplug.SharedCache(deep, listed)) == borrowed(kvplug.KVCache(deep, share=listed)) == meant
    assert borrowed(kvplug.from_spec(spec, deep)) == borrowed(kvplug.SharedCache(deep.config, groups=listed)) == meant
    assert owners(groups(meant), range(5)) == meant


def test_groups_may_be_tuples_and_empty(deep):
    assert borrowed(kvplug.SharedCache(deep, ((0, 1), (3, 4)))) == {1: 0, 4: 3}
    assert borrowed(kvplug.SharedCache(deep, [])) == {}


ACCEPTED = ["'cla2', 'cla3' and so on, 'yoco'", "[[0, 1], [2, 3]]"]
WRONG = {
    "neither": ({}, ["groups=None", "plan=None", "one of them"]),
    "both": ({"groups": "cla2", "plan": "x"}, ["groups='cla2'", "plan='x'", "one of them"]),
    "plan": ({"plan": 5}, ["plan=5", "calibrate_sharing"]),
    **{
        f"name_{name}": ({"groups": name}, [f"groups={name!r}", *ACCEPTED])
        for name in ("cla", "cla1", "cla0", "clax", "cla-2", "cla2.5", "", "pairs", "YOCO")
    },
    **{
        f"value_{value}": ({"groups": value}, [f"groups={value!r}", *ACCEPTED])
        for value in (3, True, [0, 1], [[]], [[0, 1], []], {"a": 1}, ["cla2"])
    },
    **{
        f"layer_{layer}": ({"groups": [[0, layer]]}, [f"groups=[[0, {layer!r}]]", f"layer {layer!r}", "0, 1, 2, 3, 4"])
        for layer in (5, -1, "1", 1.0, True, None)
    },
    "twice_in_a_group": ({"groups": [[0, 0]]}, ["groups=[[0, 0]]", "layer 0 twice", "once"]),
    "twice": ({"groups": [[0, 1], [1, 2]]}, ["layer 1 twice", "once"]),
    "before_its_owner": ({"groups": [[2, 0]]}, ["groups=[[2, 0]]", "layer 0 runs before layer 2", "lowest"]),
    "policies": ({"groups": "cla2", "policy": [Window(8)] * 5}, ["policy", "5", "each of the 3", "left out"]),
}


@pytest.mark.parametrize(("arguments", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(deep, arguments, told):
    with pytest.raises(ValueError) as caught:
        kvplug.SharedCache(deep, **arguments)
    assert all(part in str(caught.value) for part in told), caught.value
    assert deep.config._attn_implementation == "sdpa"


WRONG_SPECS = {
    "shared": ["no arguments", "shared:groups=cla2"],
    "shared:groups=cla2,plan=x": ["groups, plan", "one of groups and plan"],
    "shared:size=2": ["'size'", "groups, plan"],
    "shared:groups=0-x": ["groups='0-x'", "0-1/2-3"],
    "shared:groups=0-1/": ["groups='0-1/'", "0-1/2-3"],
    "shared:groups=two": ["groups='two'", "cla2"],
    "shared:groups=cla2+shared:groups=yoco": ["'shared'", "one is accepted"],
    "share:groups=cla2": ["'share'", "shared"],
}


@pytest.mark.parametrize(("spec", "told"), WRONG_SPECS.items(), ids=WRONG_SPECS)
def test_a_typo_in_a_spec_is_named(deep, spec, told):
    for make in (kvplug.from_spec, lambda spec, model: kvplug.plan(model, spec, 10)):
        with pytest.raises(ValueError) as caught:
            make(spec, deep)
        assert all(part in str(caught.value) for part in told), caught.value


def test_a_layer_that_borrows_has_no_dtype_of_its_own(deep):
    with pytest.raises(ValueError, match=r"layer_dtypes.*layer 1, which reads.*layer 0; accepted: 0, 2, 3, 4"):
        kvplug.KVCache(deep, layer_codecs={1: "int8"}, share=[[0, 1]])
    cache = kvplug.KVCache(deep, layer_codecs={0: "int8"}, share=[[0, 1]])
    assert repr(cache.layers[0]) == "KVLayer(int8)"


def test_layers_of_unequal_shapes_can_t_share(monkeypatch):
    """Where the layers of a config differ; not every transformers has such configs, so the shape itself is replaced."""
    config = transformers.LlamaConfig(**{**models.TINY, "num_hidden_layers": 3})
    monkeypatch.setattr(kvplug.compat, "kv_shape", lambda config, i: (4 if i == 1 else 2, 16, 16))
    assert borrowed(kvplug.SharedCache(config, [[0, 2]])) == {2: 0}
    with pytest.raises(ValueError, match=r"layer 1 can't share .*layer 0: it has 4 heads of .*16.* and that one 2 of"):
        kvplug.SharedCache(config, [[0, 1, 2]])


# Plans


def plan_for(model):
    return SharingPlan([[0, 2], [3, 4]], 0.4, fingerprint(model), {"text": "x"})


def test_a_plan_stands_for_its_groups(deep, tmp_path):
    plan, path = plan_for(deep), tmp_path / "plan.json"
    plan.save(path)
    assert SharingPlan.load(path) == plan
    for given in (plan, path, str(path)):
        assert borrowed(kvplug.SharedCache(deep, plan=given)) == {2: 0, 4: 3}
    assert borrowed(kvplug.SharedCache(deep.config, plan=plan)) == {2: 0, 4: 3}
    assert borrowed(kvplug.from_spec(f"shared:plan={path}+int8", deep)) == {2: 0, 4: 3}
    assert kvplug.plan(deep, f"shared:plan={path}", 300) == kvplug.plan(deep, "shared:groups=0-2/3-4", 300)


def test_a_plan_of_another_model_is_refused(deep):
    plan = plan_for(deep)
    for other, told in (
        (models.tiny_llama(num_hidden_layers=4), "num_hidden_layers is 5 there and 4 here"),
        (models.tiny_llama(seed=1, num_hidden_layers=5), "its weights are not"),
    ):
        with pytest.raises(ValueError, match=f"another model: .*{told}"):
            kvplug.SharedCache(other, plan=plan)
        assert other.config._attn_implementation == "sdpa"


DAMAGED = {
    "empty": lambda d: "",
    "cut": lambda d: json.dumps(d)[:-9],
    "no_dict": lambda d: "[1]",
    "binary": lambda d: b"\xff\xfe\x00",
    "format": lambda d: json.dumps({**d, "format": "another"}),
    "no_format": lambda d: json.dumps({k: x for k, x in d.items() if k != "format"}),
    "no_groups": lambda d: json.dumps({k: x for k, x in d.items() if k != "groups"}),
    "groups": lambda d: json.dumps({**d, "groups": None}),
    "more": lambda d: json.dumps({**d, "more": 1}),
    "model": lambda d: json.dumps({**d, "model": None}),
    "no_config": lambda d: json.dumps({**d, "model": {}}),
    "config": lambda d: json.dumps({**d, "model": {"config": 3, "dtype": None, "weights": None}}),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_plan_is_refused(deep, damage, tmp_path):
    path = tmp_path / "plan.json"
    plan_for(deep).save(path)
    text = damage(json.loads(path.read_text()))
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=r"plan='.*plan\.json' can't be used .*calibrate_sharing wrote is accepted"):
        kvplug.SharedCache(deep, plan=path)


def test_a_plan_that_is_not_there(deep, tmp_path):
    with pytest.raises(FileNotFoundError):
        kvplug.SharedCache(deep, plan=tmp_path / "plan.json")


# Memory

SPECS = [
    "", "+int8", "+int4:group_size=8,residual=6,sinks=2", "+window:window=8", "+streaming:sinks=2,window=6+int4",
    "+h2o:budget=8", "+h2o:budget=8,heads=adaptive", "+expected_attention:budget=8,future=4", "+paged:page_size=3",
    "+h2o:budget=8+int4+paged:page_size=3",
]  # fmt: skip


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("groups", ["yoco", "0-3/1-2-4"])
def test_bytes_are_those_held_and_those_planned(deep, groups, spec):
    spec = f"shared:groups={groups}{spec}"
    cache, default = kvplug.from_spec(spec, deep), DynamicCache(config=deep.config)
    for one in (cache, default):
        feed(deep, one, models.tokens(2, 20), [12, 1, 7])
    memory = cache.memory()
    assert memory.total == bytes_held(cache.layers)
    assert memory == kvplug.plan(deep, spec, 20, batch=2)
    assert memory.dense_total == sum(x.nbytes for layer in default.layers for x in (layer.keys, layer.values))
    assert memory.tokens_seen == 20
    assert memory.batch == 2


def test_what_sharing_saves(deep):
    """Three of five layers own: three fifths of the bytes, whatever else is saved."""
    for spec in ("dense", "int8", "h2o:budget=8"):
        alone, together = (kvplug.plan(deep, s, 500) for s in (spec, f"shared:groups=cla2+{spec}"))
        assert together.total * 5 == alone.total * 3
        assert together.dense_total == alone.dense_total
        assert together.ratio == pytest.approx(0.6 * alone.ratio)
        assert together.tokens_kept == alone.tokens_kept
        assert together.bits_per_element == alone.bits_per_element


# Misuse


def states(tokens, batch=2, heads=2, width=16):
    return torch.randn(batch, heads, tokens, width), torch.randn(batch, heads, tokens, width)


@pytest.mark.parametrize("spec", SPECS)
def test_a_layer_that_borrows_comes_after_its_owner_and_once(deep, spec):
    ids, spec = models.tokens(2, 20), "shared:groups=0-3/1-2-4" + spec
    expected = feed(deep, kvplug.from_spec(spec, deep), ids, [12, 8])[:, 12:]
    cache = kvplug.from_spec(spec, deep)
    with pytest.raises(ValueError, match=r"layer 0, which has none of this forward.*first, and to this one once"):
        cache.update(*states(3), 3)
    feed(deep, cache, ids[:, :12], [12])
    before = cache.memory()
    for layer, owner in ((3, 0), (2, 1), (4, 1)):
        for tokens in (3, 12):
            with pytest.raises(ValueError, match=f"layer {owner}, which has none of this forward"):
                cache.update(*states(tokens), layer)
    assert cache.memory() == before
    assert torch.equal(feed(deep, cache, ids[:, 12:], [8]), expected)


@pytest.mark.parametrize("spec", ["", "+int8", "+int4:group_size=8,residual=6,sinks=2", "+paged:page_size=3"])
def test_other_tokens_than_its_owner_s_are_refused(deep, spec):
    """The owner's are taken back, once: what is asked again is refused for having none."""
    ids, spec = models.tokens(2, 20), "shared:groups=0-3/1-2-4" + spec
    expected = feed(deep, kvplug.from_spec(spec, deep), ids, [12, 8])[:, 12:]
    cache = kvplug.from_spec(spec, deep)
    feed(deep, cache, ids[:, :12], [12])
    for wrong, told in (
        (states(2), r"2 tokens.*layer 0.*got 3; as many are accepted"),
        (states(3, batch=1), r"\(1, 2, 3, 16\).*2 rows|batch"),
        (states(3, heads=4), r"\(2, 4, 3, 16\)"),
        (states(3, width=8), r"\(2, 2, 3, 8\)"),
    ):
        for layer in (0, 1, 2):
            cache.update(*states(3), layer)
        with pytest.raises(ValueError, match=told):
            cache.update(*wrong, 3)
        for _ in range(2):
            with pytest.raises(ValueError, match="none of this forward"):
                cache.update(*states(3), 3)
        assert [layer.seen for layer in cache.layers] == [12] * 5
    assert torch.allclose(feed(deep, cache, ids[:, 12:], [8]), expected, atol=1e-4, rtol=0)


class Stop(Exception): ...


def stop(*_):
    raise Stop


@pytest.mark.parametrize("spec", SPECS)
def test_a_forward_that_is_broken_off(deep, spec):
    """Between an owner and the layers that borrow: the cache can be copied and measured, and is as new once reset."""
    spec, ids = "shared:groups=0-3/1-2-4" + spec, models.tokens(2, 20)
    expected = feed(deep, kvplug.from_spec(spec, deep), ids, [12, 8])
    cache = kvplug.from_spec(spec, deep)
    feed(deep, cache, ids, [12, 8])
    hook = deep.model.layers[1].mlp.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        feed(deep, cache, ids, [20])
    hook.remove()
    assert cache.get_seq_length() == 40
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert twin.memory().tokens_seen == 40
        if "paged" not in spec:
            twin.batch_repeat_interleave(2)
        twin.reset()
        assert twin.memory().total == 0
        assert torch.equal(feed(deep, twin, ids, [12, 8]), expected)


@pytest.mark.parametrize("spec", ["", "+int8", "+int4:group_size=8,residual=6,sinks=2"])
def test_it_goes_on_from_before_a_forward_that_was_broken_off(deep, spec):
    """The layers that had its tokens give them back."""
    spec, ids = "shared:groups=0-3/1-2-4" + spec, models.tokens(2, 20)
    expected = feed(deep, kvplug.from_spec(spec, deep), ids, [12, 8])[:, 12:]
    cache = kvplug.from_spec(spec, deep)
    feed(deep, cache, ids[:, :12], [12])
    hook = deep.model.layers[2].mlp.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        feed(deep, cache, ids[:, 12:], [8])
    hook.remove()
    for layer in cache.layers[:2]:
        layer.crop(-8)
    assert torch.allclose(feed(deep, cache, ids[:, 12:], [8]), expected, atol=1e-4, rtol=0)


LOOKS = {"memory": lambda cache: cache.memory(), "contents": lambda cache: (list(cache), repr(cache))}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("spec", SPECS)
def test_a_look_in_the_middle_of_a_forward_changes_nothing(deep, spec, look):
    """Between an owner and a layer that borrows, as by a hook that logs: no slot may be reused before all have read."""
    spec, ids = "shared:groups=0-3/1-2-4" + spec, models.tokens(2, 22)
    expected = feed(deep, kvplug.from_spec(spec, deep), ids, [12, 1, 1, 8])
    cache = kvplug.from_spec(spec, deep)
    for layer in deep.model.layers:
        layer.register_forward_hook(lambda *_: look(cache) and None)
    assert torch.equal(feed(deep, cache, ids, [12, 1, 1, 8]), expected)
    assert cache.memory().total == bytes_held(cache.layers)
