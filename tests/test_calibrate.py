"""The search for layers that may share, against a search by hand that runs the model on an oracle's shared cache."""

import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplug
from kvplug.calibrate import search
from tests import models
from tests.oracles import NAME
from tests.sharing_oracles import Lending

LAYERS = 5


@pytest.fixture
def deep():
    return models.tiny_llama(num_hidden_layers=LAYERS)


def damage_by_hand(model, groups, rows):
    """KL of the model to itself with layers that share, nats a token, in double precision."""
    total, tokens = 0.0, 0
    for row in rows:
        with torch.no_grad():
            own = model(row[None]).logits.double().log_softmax(-1)
            other = model(row[None], **{NAME: Lending(model.config, groups)}).logits.double().log_softmax(-1)
        total += float((own.exp() * (own - other)).sum())
        tokens += len(row)
    return total / tokens


def as_groups(owned):
    """Groups by hand, from the owner of each layer that borrows."""
    owners = sorted(set(owned.values()))
    return [[owner, *sorted(layer for layer, one in owned.items() if one == owner)] for owner in owners]


def moved(owned, owner, layer):
    """`layer`, and all that read it, read `owner`."""
    owned = {**owned, layer: owner}
    for reader, one in owned.items():
        if one == layer:
            owned[reader] = owner
    return owned


def search_by_hand(damage, pairs, borrowers):
    """Every pair of layers that own is tried at each step."""
    owned, told = {}, []
    for _ in range(borrowers):
        found = {}
        for owner, layer in pairs:
            if owner not in owned and layer not in owned:
                found[owner, layer] = damage(as_groups(moved(owned, owner, layer)))
        best = min(found, key=found.get)
        owned = moved(owned, *best)
        told.append((best, found[best]))
    return told


def test_the_plan_is_that_of_a_search_by_hand(deep):
    rows = [models.tokens(1, 24, seed=seed)[0] for seed in (1, 2)]
    plan = kvplug.calibrate_sharing(deep, rows, share=0.6, candidates=100, progress=False)
    kvplug.detach(deep)
    pairs = list(itertools.combinations(range(LAYERS), 2))
    expected = search_by_hand(lambda groups: damage_by_hand(deep, groups, rows), pairs, 3)
    assert [(step["owner"], step["layer"]) for step in plan.report["steps"]] == [pair for pair, _ in expected]
    for step, (_, kl) in zip(plan.report["steps"], expected, strict=True):
        assert step["kl"] == pytest.approx(kl, rel=1e-3)
    owned = {}
    for pair, _ in expected:
        owned = moved(owned, *pair)
    assert plan.groups == as_groups(owned)
    assert plan.share == 0.6
    assert plan.report["tokens"] == 48


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 7), st.data())
def test_any_damage_and_any_number_of_layers(random, layers, data):
    """With all pairs as candidates the search is the one by hand, whatever the figures are."""
    pairs = list(itertools.combinations(range(layers), 2))
    borrowers = data.draw(st.integers(1, layers - 1))
    known = {}

    def damage(groups):
        return known.setdefault(str(groups), random.random())

    alone = {pair: damage([list(pair)]) for pair in pairs}
    assert search(damage, alone, borrowers, len(pairs)) == search_by_hand(damage, pairs, borrowers)


def test_few_candidates_are_those_that_do_least_alone():
    tried = []

    def damage(groups):
        tried.append(groups)
        return len(tried)

    alone = {(0, 1): 3.0, (0, 2): 1.0, (1, 2): 2.0}
    assert search(damage, alone, 1, 2) == [((0, 2), 1)]
    assert tried == [[[0, 2]], [[1, 2]]]


def test_a_layer_that_is_read_may_be_given_up_with_its_readers():
    figures = {"[[1, 2]]": 1.0, "[[0, 1, 2]]": 2.0}
    found = search(lambda groups: figures.get(str(groups), 9.0), {(1, 2): 1.0, (0, 1): 2.0, (0, 2): 3.0}, 2, 8)
    assert found == [((1, 2), 1.0), ((0, 1), 2.0)]


def test_the_model_is_as_it_was_and_the_plan_is_in_the_file(deep, tmp_path):
    before = {name: x.clone() for name, x in deep.state_dict().items()}
    deep.train()
    ids = models.tokens(1, 20)
    path = tmp_path / "plan.json"
    plan = kvplug.calibrate_sharing(deep, list(ids), 0.25, path=path, progress=False)
    assert deep.training
    assert all(x.equal(before[name]) for name, x in deep.state_dict().items())
    assert kvplug.SharingPlan.load(path) == plan
    assert json.loads(path.read_text())["groups"] == plan.groups
    assert len(plan.groups) == 1
    cache = kvplug.SharedCache(deep.eval(), plan=path)
    cut = Lending(deep.config, plan.groups)
    with torch.no_grad():
        assert torch.allclose(deep(ids, **{NAME: cache}).logits, deep(ids, **{NAME: cut}).logits, atol=1e-5)


def test_only_the_first_tokens_of_a_text_count(deep):
    ids = models.tokens(1, 30)[0]
    whole, cut = (kvplug.calibrate_sharing(deep, [x], 0.4, tokens=12, progress=False) for x in (ids, ids[:12]))
    assert whole == cut


def test_a_bar_is_shown_and_reaches_its_end(deep, capsys):
    kvplug.calibrate_sharing(deep, [models.tokens(1, 8)[0]], 0.25, candidates=2)
    told = capsys.readouterr().err
    assert "sharing" in told
    assert "12/12" in told.replace(" ", "")


class Letters:
    """A tokenizer of one token a letter."""

    def __call__(self, text):
        return type("Encoding", (), {"input_ids": [ord(letter) % 90 for letter in text]})


def test_strings_are_read_by_the_tokenizer(deep):
    text = "the quick brown fox"
    ids = torch.tensor(Letters()(text).input_ids)
    by_text = kvplug.calibrate_sharing(deep, [text], 0.25, tokenizer=Letters(), progress=False)
    assert by_text == kvplug.calibrate_sharing(deep, [ids], 0.25, progress=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"share": 0}, "share=0 is not valid"),
        ({"share": 1.0}, r"share=1.0 is not valid"),
        ({"share": True}, "share=True is not valid"),
        ({"share": "a quarter"}, "share='a quarter'"),
        ({"share": 0.05}, r"share=0.05 of 5 .* can't be had"),
        ({"share": 0.95}, r"share=0.95 of 5 .* can't be had"),
        ({"tokens": 1}, "tokens=1"),
        ({"candidates": 0}, "candidates=0"),
        ({"texts": []}, r"texts=\[\]"),
        ({"texts": "one text"}, "texts='one text'"),
        ({"texts": torch.ones(2, 9, dtype=torch.long)}, "texts="),
        ({"texts": [torch.ones(2, 9, dtype=torch.long)]}, r"texts\[0\]=\(2, 9\)"),
        ({"texts": [torch.ones(9)]}, r"texts\[0\]=\(9,\)"),
        ({"texts": [torch.ones(1, dtype=torch.long)]}, r"texts\[0\]=\(1,\)"),
        ({"texts": [7]}, r"texts\[0\]=int"),
        ({"texts": ["without a tokenizer"]}, "tokenizer=None"),
    ],
)
def test_what_is_wrong_is_named(deep, arguments, told):
    with pytest.raises(ValueError, match=told):
        kvplug.calibrate_sharing(**{"model": deep, "texts": [models.tokens(1, 9)[0]], "progress": False} | arguments)


def test_a_config_has_no_predictions(deep):
    with pytest.raises(ValueError, match="model=LlamaConfig is not accepted"):
        kvplug.calibrate_sharing(deep.config, [models.tokens(1, 9)[0]])
