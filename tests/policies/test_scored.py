"""What policies that score tokens keep: the sets of every head against brute force, what moves with a row, and what
they refuse. Two query heads share each of two key-value heads.
"""

import pytest
import torch

import kvplug
from tests import models
from tests.caches import AHEAD, VOTES, scored
from tests.oracles import LOGITS, SAME_KERNEL, feed, spans
from tests.tape import Tape
from tests.walker import bytes_held

CACHES = {
    "h2o": (kvplug.H2OCache, {}),
    "snapkv": (kvplug.SnapKVCache, VOTES),
    "tova": (kvplug.TOVACache, {}),
    "keydiff": (kvplug.KeyDiffCache, {}),
    "knorm": (kvplug.KnormCache, {}),
    "expected": (kvplug.ExpectedAttentionCache, AHEAD),
}
COMPETING = [name for name in CACHES if name != "tova"]  # TOVA's heads keep the same tokens
PAIRS = [
    (method, heads)
    for method in CACHES
    for heads in ("uniform", "adaptive")
    if heads == "uniform" or method in COMPETING
]
pairs = pytest.mark.parametrize(("method", "heads"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
CHUNKS = {
    "prompt_then_steps": [15] + [1] * 25,
    "turns": [7, 7, 1, 1, 1, 9, 1, 1, 1, 11],
    "eights": [5] * 8,
    "at_once": [40],
}
methods = pytest.mark.parametrize("method", CACHES)
chunkings = pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)


def cache_of(method, model, budget, **settings):
    make, own = CACHES[method]
    return make(model, budget, **{"sinks": 2, **own, **settings})


def keep_of(method, budget, heads="uniform", **settings):
    own = CACHES[method][1]
    return scored(method, budget=budget, adaptive=heads == "adaptive", **{"sinks": 2, **own, **settings})


def kept(layer, rows, heads=2):
    """Positions that each row and head holds, sorted: `[rows][heads]` lists."""
    at, found = layer.store.positions, []
    for row in range(rows):
        own = at[min(row, len(at) - 1)]
        if getattr(layer, "shared", False):
            owners = layer.store.slot_owners[row]
            each = [own[0, owners == head] for head in range(heads)]
        else:
            each = [own[min(head, len(own) - 1)] for head in range(heads)]
        found.append([sorted(x[x >= 0].tolist()) for x in each])
    return found


def assert_kept(tape, cache, keeps, mask=None):
    """What each layer, row and head holds is what brute force on the layer's own inputs gives."""
    worst, slow = tape.replay(keeps, mask)
    assert worst < LOGITS
    for layer, rows in zip(cache.layers, slow, strict=True):
        for number, (ours, row) in enumerate(zip(kept(layer, len(rows)), rows, strict=True)):
            columns = range(row.seen) if mask is None else real_columns(mask[number], row.seen)
            assert ours == [[columns[i] for i in row.held(head)] for head in range(2)], f"row {number}"


def real_columns(mask, seen):
    columns = mask.nonzero()[:, 0].tolist()
    return columns + list(range(len(mask), len(mask) + seen - len(columns)))


@methods
@chunkings
@pytest.mark.parametrize("budget", [1, 4, 8, 29])
def test_every_head_keeps_what_brute_force_keeps(model, method, chunks, budget):
    cache, ids, keep = cache_of(method, model, budget), models.tokens(2, 40), keep_of(method, budget)
    with Tape(model, cache) as tape:
        for start, end in spans(chunks):
            feed(model, cache, ids[:, start:end], [end - start])
            held = [len(head) for layer in cache.layers for row in kept(layer, 2) for head in row]
            assert held == [min(end, budget)] * 8
            assert cache.memory().tokens_kept == min(end, budget)
    assert_kept(tape, cache, keep)


@pytest.mark.parametrize("method", COMPETING)
@chunkings
@pytest.mark.parametrize("budget", [1, 8, 29])
def test_heads_that_compete_keep_the_budget_together(model, method, chunks, budget):
    settings = {"heads": "adaptive", "recent": 1}
    cache, ids = cache_of(method, model, budget, **settings), models.tokens(2, 40)
    with Tape(model, cache) as tape:
        for start, end in spans(chunks):
            feed(model, cache, ids[:, start:end], [end - start])
            for layer in cache.layers:
                for row in kept(layer, 2):
                    assert sum(map(len, row)) == 2 * min(end, budget)
    assert_kept(tape, cache, keep_of(method, budget, **settings))


def test_heads_that_compete_do_not_all_get_the_same(model):
    cache = cache_of("knorm", model, 8, heads="adaptive")
    feed(model, cache, models.tokens(3, 40), [40])
    assert any(len(set(map(len, row))) > 1 for layer in cache.layers for row in kept(layer, 3))


def test_a_head_whose_scores_are_all_lower_has_a_fifth_of_an_even_share(model):
    """Keys of the second head are a hundred times as long, so `KeyNorm` would leave it nothing but what is for sure."""
    cache = cache_of("knorm", model, 20, sinks=1, recent=1, heads="adaptive")
    keys = torch.randn(1, 2, 60, 16) * torch.tensor([1.0, 100.0])[:, None, None]
    for layer in range(2):
        cache.update(keys, torch.randn(1, 2, 60, 16), layer)
    cache.memory()  # settles
    for layer in cache.layers:
        first, second = kept(layer, 1)[0]
        assert (len(first), len(second)) == (36, 4)
        assert second[0] == 0 and second[-1] == 59
        norms = keys[0, 1, 1:59].norm(dim=-1)
        assert second[1:-1] == sorted((norms.topk(2, largest=False).indices + 1).tolist())


@methods
@pytest.mark.parametrize("budgets", [(6, 10), (10, 6)], ids=str)
@pytest.mark.parametrize("chunks", [CHUNKS["turns"], CHUNKS["prompt_then_steps"]], ids=["turns", "prompt_then_steps"])
def test_budgets_by_layer(model, method, budgets, chunks):
    cache = cache_of(method, model, 8, layers=list(budgets))
    with Tape(model, cache) as tape:
        feed(model, cache, models.tokens(2, 40), chunks)
    assert [layer.store.length for layer in cache.layers] == list(budgets)
    assert_kept(tape, cache, [keep_of(method, budget) for budget in budgets])


def test_a_pyramid_gives_the_first_layer_most_and_all_of_the_budget_away(model):
    cache = cache_of("knorm", model, 20, layers="pyramid")
    feed(model, cache, models.tokens(1, 60), [60])
    lengths = [layer.store.length for layer in cache.layers]
    assert sum(lengths) == 40
    assert lengths == [39, 1]  # shares of 1.95 and 0.05


@methods
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_share_is_of_the_first_forward_s_real_tokens_in_each_row(model, method, share):
    _, ids, mask = models.left_padded([5, 14, 9, 1])
    more = models.tokens(4, 8, seed=5)
    longer = torch.cat([mask, torch.ones_like(more)], 1)
    cache = cache_of(method, model, share)
    with Tape(model, cache) as tape:
        feed(model, cache, torch.cat([ids, more], 1), [14, 1, 1, 5, 1], longer)
    budgets = [max(int(share * n), 1) for n in (5, 14, 9, 1)]
    assert [len(row[0]) for row in kept(cache.layers[0], 4)] == budgets
    assert_kept(tape, cache, keep_of(method, share), longer)


@pairs
@pytest.mark.parametrize("chunks", [[14] + [1] * 12, [14, 1, 5, 1, 5]], ids=["steps", "turns"])
def test_rows_of_a_padded_batch_keep_what_they_keep_alone(model, method, heads, chunks):
    _, ids, mask = models.left_padded([5, 14, 9, 1])
    more = models.tokens(4, 12, seed=5)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    cache = cache_of(method, model, 8, heads=heads)
    with Tape(model, cache) as tape:
        feed(model, cache, ids, chunks, mask)
    assert_kept(tape, cache, keep_of(method, 8, heads), mask)


@methods
def test_padding_in_the_middle_is_no_sink(model, method):
    """No padding at first: what is held then has no row of its own yet."""
    first, (_, second, second_mask) = models.tokens(3, 3), models.left_padded([1, 3, 2], seed=40)
    more = models.tokens(3, 9, seed=60)
    ids = torch.cat([first, second, more], 1)
    mask = torch.cat([torch.ones_like(first), second_mask, torch.ones_like(more)], 1)
    cache = cache_of(method, model, 6)
    with Tape(model, cache) as tape:
        feed(model, cache, ids, [3, 3] + [1] * 9, mask)
    assert_kept(tape, cache, keep_of(method, 6), mask)


@methods
def test_a_row_that_a_forward_brings_nothing_stays_as_it_is(model, method):
    """Steps in which some rows are padding: their scores neither fade nor grow."""
    first, more = models.tokens(2, 12), models.tokens(2, 10, seed=3)
    mask = torch.ones(2, 22, dtype=torch.long)
    mask[0, 0] = mask[0, 12:16] = 0
    cache = cache_of(method, model, 8)
    with Tape(model, cache) as tape:
        feed(model, cache, torch.cat([first, more], 1), [12, 1, 1, 2] + [1] * 6, mask)
    assert_kept(tape, cache, keep_of(method, 8), mask)


@pairs
def test_scores_move_with_their_rows(model, method, heads):
    ids, more = models.tokens(3, 11), models.tokens(4, 9, seed=3)
    cache = cache_of(method, model, 8, heads=heads)
    with Tape(model, cache) as tape:
        feed(model, cache, ids, [5, 6])
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        feed(model, cache, more[:3, :3], [1, 1, 1])
        cache.batch_select_indices(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        feed(model, cache, more[:, 3:], [1, 1, 3, 1])
    assert_kept(tape, cache, keep_of(method, 8, heads))


@pairs
@pytest.mark.parametrize("chunks", [[4], [1] * 4, [3, 1]], ids=str)
def test_cropped_tokens_are_gone_and_what_they_said_of_others_stays(model, method, heads, chunks):
    ids, wrong = models.tokens(2, 20), models.tokens(2, 4, seed=8)
    cache, straight = (cache_of(method, model, 12, heads=heads) for _ in range(2))
    expected = feed(model, straight, ids[:, :12], [7, 1, 3, 1])
    with Tape(model, cache) as tape:
        feed(model, cache, ids[:, :8], [7, 1])
        before = cache.memory()
        feed(model, cache, wrong, chunks)
        cache.crop(-4)
        assert cache.get_seq_length() == cache.memory().tokens_kept == 8
        assert cache.memory().used == before.used
        assert cache.memory().total == bytes_held(cache.layers)
        for layer in cache.layers:
            assert kept(layer, 2) == [[list(range(8))] * 2] * 2
            if layer.policy.lasting:
                assert layer.store.scores.shape == (2, 2, 8)
        # Nothing was dropped yet, so no score has a say.
        within = feed(model, cache, ids[:, 8:12], [3, 1])
        assert torch.allclose(within, expected[:, 8:], atol=SAME_KERNEL, rtol=0)
        assert cache.memory() == straight.memory()
        feed(model, cache, ids[:, 12:], [2, 1, 1, 1, 1, 1, 1])
    assert_kept(tape, cache, keep_of(method, 12, heads))


@pairs
def test_a_crop_behind_an_eviction_says_what_can_be_cropped(model, method, heads):
    cache = cache_of(method, model, 8, heads=heads)
    feed(model, cache, models.tokens(1, 12), [12])
    with pytest.raises(ValueError, match=r"tokens_to_remove=-2.*dropped.*accepted"):
        cache.crop(-2)
    assert cache.get_seq_length() == 12


WRONG = {
    "budget_zero": (dict(budget=0), ["budget=0", "at least 1"]),
    "budget_negative": (dict(budget=-3), ["budget=-3", "at least 1"]),
    "budget_true": (dict(budget=True), ["budget=True"]),
    "budget_text": (dict(budget="8"), ["budget='8'"]),
    "budget_none": (dict(budget=None), ["budget=None"]),
    "share_zero": (dict(budget=0.0), ["budget=0.0", "above 0"]),
    "share_above_one": (dict(budget=1.5), ["budget=1.5", "1.0"]),
    "share_nan": (dict(budget=float("nan")), ["budget=nan"]),
    "sinks_negative": (dict(sinks=-1), ["sinks=-1", "0"]),
    "sinks_fraction": (dict(sinks=1.5), ["sinks=1.5"]),
    "recent_zero": (dict(recent=0), ["recent=0", "1"]),
    "recent_above_the_budget": (dict(recent=9), ["recent=9", "budget=8"]),
    "heads": (dict(heads="ragged"), ["heads='ragged'", "uniform", "adaptive"]),
    "layers_text": (dict(layers="cone"), ["layers='cone'", "pyramid"]),
    "layers_too_few": (dict(layers=[1.0]), ["layers=", "1", "2"]),
    "layers_too_many": (dict(layers=[1, 2, 3]), ["layers=", "3", "2"]),
    "layers_zero": (dict(layers=[0, 1]), ["layers=", "positive"]),
    "layers_empty": (dict(layers=[]), ["layers=", "positive"]),
    "codec": (dict(codec="zip"), ["codec", "zip", "int4"]),
}
OWN = {
    "observe_zero": ("snapkv", dict(observe=0), ["observe=0", "1"]),
    "kernel_zero": ("snapkv", dict(kernel=0), ["kernel=0", "1"]),
    "kernel_even": ("snapkv", dict(kernel=4), ["kernel=4", "odd"]),
    "same_heads": ("tova", dict(heads="adaptive"), ["heads='adaptive'", "TOVA", "uniform"]),
    "future_zero": ("expected", dict(future=0), ["future=0", "1"]),
}


def refused(method, model, settings, words):
    with pytest.raises(ValueError) as error:
        cache_of(method, model, **{"budget": 8, **settings})
    for word in words:
        assert word in str(error.value)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("method", ["h2o", "expected"])
@pytest.mark.parametrize(("settings", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument(model, method, settings, words):
    refused(method, model, settings, words)


@pytest.mark.parametrize(("method", "settings", "words"), OWN.values(), ids=OWN)
def test_a_wrong_argument_of_one_policy(model, method, settings, words):
    refused(method, model, settings, words)


def test_the_base_of_the_recipes_names_them(model):
    with pytest.raises(ValueError, match=r"H2OCache.*SnapKVCache.*TOVACache"):
        kvplug.recipes.ScoredCache(model, 8)


@pytest.mark.parametrize("tokens", [5, 8, 9, 40])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        (name, more)
        for name in ("h2o", "snapkv", "tova", "keydiff", "knorm", "expected_attention")
        for more in ("", ",heads=adaptive", ",heads=adaptive+int4", "+int8")
        if name != "tova" or "adaptive" not in more
    ],
)
def test_the_plan_is_what_a_prompt_leaves(model, name, more, tokens):
    spec = f"{name}:budget=8{more}"
    cache = kvplug.from_spec(spec, model)
    feed(model, cache, models.tokens(2, tokens), [tokens])
    assert kvplug.plan(model.config, spec, tokens, batch=2) == cache.memory()
