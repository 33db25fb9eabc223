"""What a model answers whose layers share keys and values: what transformers' own attention gives over the owner's
tensors, however the tokens come in, and under codecs, policies and pages what a replay in float64 gives.
"""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplug
from kvplug.policies import ExpectedAttention, HeavyHitters, KeyDiff, KeyNorm, NewestQuery, SinkWindow, Votes, Window
from tests import models
from tests.caches import AHEAD, RECORDS, VOTES, keep, scored
from tests.oracles import LOGITS, NAME, SAME_KERNEL, feed
from tests.sharing_oracles import GROUPINGS, Lending, SharedTape, by_hand, masked_by_hand

CHUNKS = [12, 1, 1, 7, 1]
DENSE = {"contiguous": {}, "paged": {"paged": True}}
# Two orders of summation in float64; what a wrong layer gives is off by more than 1.
EXACT = 1e-10


def deep_llama(**settings):
    """Five layers amplify the rounding of the first, so whole answers are compared in float64."""
    return models.tiny_llama(num_hidden_layers=5, **settings).double()


def shared(model, groups, paged=False, **more):
    """A cache of one buffer a layer, or of pages."""
    if paged:
        return kvplug.from_spec(f"shared:groups={'/'.join('-'.join(map(str, g)) for g in groups)}+paged", model)
    return kvplug.SharedCache(model, groups, **more)


def options(ids, cache, mask=None, **more):
    return {
        "attention_mask": torch.ones_like(ids) if mask is None else mask, NAME: cache, "max_new_tokens": 8,
        "do_sample": False, **more,
    }  # fmt: skip


dense = pytest.mark.parametrize("how", DENSE.values(), ids=DENSE)
grouped = pytest.mark.parametrize("groups", GROUPINGS.values(), ids=GROUPINGS)


@grouped
def test_the_oracles_agree_and_sharing_is_seen(groups):
    model, ids = deep_llama(), models.tokens(2, 22)
    lent = feed(model, Lending(model.config, groups), ids, CHUNKS)
    with torch.no_grad():
        assert torch.allclose(lent, by_hand(model, ids, groups), atol=EXACT, rtol=0)
    assert (lent - model(ids, use_cache=False).logits).abs().max() > 1


@pytest.mark.parametrize("chunks", [CHUNKS, [1] * 22], ids=str)
@dense
@grouped
def test_the_logits_are_those_over_the_owner_s_tensors(groups, how, chunks):
    model, ids = deep_llama(), models.tokens(2, 22)
    expected = feed(model, Lending(model.config, groups), ids, chunks)
    cache = shared(model, groups, **how)
    assert torch.allclose(feed(model, cache, ids, chunks), expected, atol=EXACT, rtol=0)
    assert [cache.get_seq_length(i) for i in range(5)] == [22] * 5


@dense
def test_rows_of_a_padded_batch_are_the_rows_alone(how):
    groups = GROUPINGS["apart"]
    model, other = deep_llama(), deep_llama()
    rows, ids, mask = models.left_padded([5, 22, 9])
    result = feed(model, shared(model, groups, **how), ids, CHUNKS, mask)
    for row, alone in enumerate(rows):
        expected = by_hand(other, alone, groups)[0]
        assert torch.allclose(result[row, -alone.shape[1] :], expected, atol=EXACT, rtol=0)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("beams", [1, 4])
@dense
def test_generate_gives_the_oracle_s_tokens(how, beams, rows):
    groups, ids = GROUPINGS["threes"], models.tokens(rows, 12)
    model, other = deep_llama(), deep_llama()
    more = {"num_beams": beams, "num_return_sequences": beams}
    expected = other.generate(ids, **options(ids, Lending(other.config, groups), **more))
    made = model.generate(ids, **options(ids, shared(model, groups, **how), **more))
    assert made.equal(expected)
    if beams > 1:
        assert len({tuple(row.tolist()) for row in made}) == beams * rows


def test_generate_for_a_padded_batch():
    groups, model, other = GROUPINGS["apart"], deep_llama(), deep_llama()
    _, ids, mask = models.left_padded([5, 14, 9])
    expected = other.generate(ids, **options(ids, Lending(other.config, groups), mask))
    assert model.generate(ids, **options(ids, kvplug.SharedCache(model, groups), mask)).equal(expected)


CHANGES = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([2, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "crop": lambda cache: cache.crop(-4),
    "crop_nothing": lambda cache: cache.crop(0),
    "to_the_host_and_back": lambda cache: [(layer.offload(), layer.prefetch()) for layer in cache.layers],
    "to_the_host": lambda cache: [layer.offload() for layer in cache.layers],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@dense
def test_after_a_change_it_goes_on_as_the_oracle_does(how, change):
    groups, model = GROUPINGS["apart"], deep_llama()
    lent, cache = Lending(model.config, groups), shared(model, groups, **how)
    prompt = models.tokens(3, 13)
    for one in (lent, cache):
        feed(model, one, prompt, [12, 1])
        change(one)
    assert cache.get_seq_length() == lent.get_seq_length()
    rows = lent.layers[0].keys.shape[0]
    more = models.tokens(rows, 6, seed=9)
    expected = feed(model, lent, more, [5, 1])
    assert torch.allclose(feed(model, cache, more, [5, 1]), expected, atol=EXACT, rtol=0)


def restored(cache, tmp_path, model):
    cache.save(tmp_path / "cache")
    return kvplug.load(tmp_path / "cache", model)


COPIES = {
    "copy": lambda cache, *_: copy.deepcopy(cache),
    "pickle": lambda cache, *_: pickle.loads(pickle.dumps(cache)),
    "file": restored,
}
# What a copy must carry: plain tensors, codes with a residual, positions, scores and queries, pages.
CARRIED = {
    "dense": "",
    "int4": "+int4:group_size=8,residual=3,sinks=1",
    "streaming": "+streaming:sinks=2,window=6",
    "h2o_int8": "+h2o:budget=8,sinks=2+int8",
    "expected_attention": "+expected_attention:budget=8,future=16",
    "paged_snapkv": "+snapkv:budget=8,observe=4,kernel=3+paged:page_size=4",
}


@pytest.mark.parametrize("copier", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("spec", CARRIED.values(), ids=CARRIED)
def test_a_copy_goes_its_own_way(spec, copier, tmp_path):
    """The original and its copy read different suffixes in turn; each equals a cache that read the whole by itself."""
    model, spec = deep_llama().float(), "shared:groups=0-3/1-2-4" + spec
    prompt, suffixes = models.tokens(2, 13), [models.tokens(2, 8, seed=seed) for seed in (30, 31)]
    original = kvplug.from_spec(spec, model)
    feed(model, original, prompt, [12, 1])
    twin = copier(original, tmp_path, model)
    results = [[], []]
    for start, end in ((0, 1), (1, 6), (6, 8)):
        for cache, suffix, found in zip((original, twin), suffixes, results, strict=True):
            found.append(feed(model, cache, suffix[:, start:end], [end - start]))
    for cache, suffix, found in zip((original, twin), suffixes, results, strict=True):
        alone = kvplug.from_spec(spec, model)
        expected = feed(model, alone, torch.cat([prompt, suffix], 1), [12, 1, 1, 5, 2])[:, 13:]
        assert torch.equal(torch.cat(found, 1), expected)
        assert cache.memory().used == alone.memory().used
    assert repr(twin) == repr(original)


@pytest.mark.parametrize("spec", CARRIED.values(), ids=CARRIED)
def test_a_reset_cache_is_a_new_one(spec):
    model, spec = deep_llama().float(), "shared:groups=cla3" + spec
    cache = kvplug.from_spec(spec, model)
    for ids, mask in ((models.tokens(1, 22), None), models.left_padded([3, 22, 11])[1:], (models.tokens(2, 22), None)):
        expected = feed(model, kvplug.from_spec(spec, model), ids, CHUNKS, mask)
        assert torch.equal(feed(model, cache, ids, CHUNKS, mask), expected)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.memory().total == 0


def test_a_prompt_that_is_run_once_for_several_rows():
    groups, model, ids = GROUPINGS["threes"], deep_llama(), models.tokens(2, 12)
    expected = deep_llama().generate(ids, **options(ids, Lending(model.config, groups), num_beams=3))
    cache = kvplug.prefill(model, ids, kvplug.SharedCache(model, groups), rows=3, chunk=5)
    assert model.generate(ids, **options(ids, cache, num_beams=3)).equal(expected)


# Under codecs, policies and stores: how the cache is made, and what the layers that own keep.
COMPOSED = {
    "int8": ({"codec": "int8"}, keep("int8")),
    "int8_residual": ({"codec": "int8", "residual": 3, "sinks": 2}, keep("int8", residual=3, sinks=2, group=16)),
    "window": ({"policy": Window(8)}, keep(window=8)),
    "window_int4": ({"policy": Window(8), "codec": "int4"}, keep("int4", window=8)),
    "streaming": ({"policy": SinkWindow(2, 6)}, keep(sinks=2, window=6, compact=True)),
    "streaming_original": ({"policy": SinkWindow(2, 6, positions="original")}, keep(sinks=2, window=6)),
    "streaming_fp8": ({"policy": SinkWindow(2, 6), "codec": "fp8"}, keep("fp8", sinks=2, window=6, compact=True)),
    "h2o": ({"policy": HeavyHitters(8, sinks=2)}, scored("h2o")),
    "h2o_int4": ({"policy": HeavyHitters(8, sinks=2), "codec": "int4"}, scored("h2o", "int4")),
    "snapkv": ({"policy": Votes(8, sinks=2, **VOTES)}, scored("snapkv", **VOTES)),
    "tova": ({"policy": NewestQuery(8, sinks=2)}, scored("tova")),
    "keydiff": ({"policy": KeyDiff(8, sinks=2)}, scored("keydiff")),
    "knorm": ({"policy": KeyNorm(8, sinks=2)}, scored("knorm")),
    "expected_attention": ({"policy": ExpectedAttention(8, sinks=2, **AHEAD)}, scored("expected", **AHEAD)),
    "h2o_share": ({"policy": HeavyHitters(0.5, sinks=2)}, scored("h2o", budget=0.5)),
    "h2o_adaptive": (
        {"policy": HeavyHitters(8, 2, sinks=2, heads="adaptive")},
        scored("h2o", recent=2, adaptive=True),
    ),
    "snapkv_adaptive_int8": (
        {"policy": Votes(8, sinks=2, heads="adaptive", **VOTES), "codec": "int8"},
        scored("snapkv", "int8", adaptive=True, **VOTES),
    ),
}
SPECS = {
    "int4": ("int4:group_size=8,residual=6,sinks=2", keep("int4 by 8", residual=6, sinks=2, group=8)),
    "paged_int8": ("paged:page_size=3+int8", keep("int8")),
    "paged_window": ("paged:page_size=3+window:window=8", keep(window=8)),
    "paged_h2o_int4": ("h2o:budget=8,sinks=2+int4+paged:page_size=3", scored("h2o", "int4")),
}
MAKES = {name: (lambda m, g, kw=kw: kvplug.SharedCache(m, g, **kw), one) for name, (kw, one) in COMPOSED.items()}
MAKES |= {
    name: (
        lambda m, g, spec=spec: kvplug.from_spec(
            f"shared:groups={'/'.join('-'.join(map(str, layers)) for layers in g)}+{spec}", m
        ),
        one,
    )
    for name, (spec, one) in SPECS.items()
}
composed = pytest.mark.parametrize(("make", "kept"), MAKES.values(), ids=MAKES)


@composed
@pytest.mark.parametrize(
    ("groups", "padded"), [(GROUPINGS["pairs"], False), (GROUPINGS["apart"], True)], ids=["full", "padded"]
)
def test_every_layer_answers_as_the_replay(groups, padded, make, kept):
    model = models.tiny_llama(num_hidden_layers=5)
    ids, mask = models.left_padded([5, 22, 9])[1:] if padded else (models.tokens(2, 22), None)
    cache = make(model, groups)
    with SharedTape(model, cache, groups) as tape:
        feed(model, cache, ids, CHUNKS, mask)
    assert tape.worst(kept, mask) < LOGITS
    assert cache.memory().tokens_kept <= 22


@pytest.mark.parametrize("name", ["int4", "paged_int8", "streaming", "h2o", "expected_attention", "h2o_adaptive"])
def test_every_layer_answers_each_beam(name):
    make, kept = MAKES[name]
    model, groups, ids = models.tiny_llama(num_hidden_layers=5), GROUPINGS["threes"], models.tokens(2, 6)
    cache = make(model, groups)
    with SharedTape(model, cache, groups) as tape:
        model.generate(ids, **options(ids, cache, num_beams=3))
    assert any(event[0] == "reorder_cache" for event in tape.events)
    assert tape.worst(kept) < LOGITS


def test_only_the_owner_s_queries_would_be_seen():
    """That the other layers of a group vote is seen by the replay."""
    model, groups = models.tiny_llama(num_hidden_layers=5), GROUPINGS["threes"]
    cache = kvplug.SharedCache(model, groups, policy=HeavyHitters(8, sinks=2))
    with SharedTape(model, cache, groups) as tape:
        feed(model, cache, models.tokens(2, 22), CHUNKS)
    worst = 0.0
    for event in tape.events:
        if event[0] == "forward" and event[1] in (1, 2, 4):
            event[2] = (event[2][0].flip(1), *event[2][1:])
            worst = 1.0
    assert worst and tape.worst(scored("h2o")) > 0.1


@pytest.mark.skipif(not RECORDS, reason="recording needs a newer transformers")
@pytest.mark.parametrize("spec", ["+window:window=8", "+knorm:budget=8", "", "+int4:residual=3,group_size=8"])
def test_recorded_tokens_can_be_taken_back(spec):
    """A forward of drafted tokens that is cropped again leaves no trace."""
    model, spec = models.tiny_llama(num_hidden_layers=5), "shared:groups=cla2" + spec
    ids, wrong = models.tokens(2, 20), models.tokens(2, 4, seed=3)
    caches = [kvplug.from_spec(spec, model) for _ in range(2)]
    results = []
    for cache, drafts in zip(caches, (wrong, wrong[:, :0]), strict=True):
        feed(model, cache, ids[:, :13], [12, 1])
        cache.activate_past_recording()
        step = torch.cat([ids[:, 13:14], drafts], 1)
        feed(model, cache, step, [step.shape[1]])
        cache.crop(-drafts.shape[1])
        results.append(feed(model, cache, ids[:, 14:], [6]))
        cache.crop(0)
    assert torch.allclose(*results, atol=LOGITS, rtol=0)
    assert caches[0].memory().used == caches[1].memory().used


@pytest.mark.parametrize("chunks", [CHUNKS, [22], [5] * 4 + [2]], ids=str)
def test_a_window_is_one_forward_under_its_mask(chunks):
    model, groups, ids = deep_llama(), GROUPINGS["threes"], models.tokens(1, 22)
    for policy, kept in (
        (Window(8), keep(window=8)),
        (SinkWindow(2, 4, positions="original"), keep(sinks=2, window=4)),
    ):
        result = feed(model, kvplug.SharedCache(model, groups, policy=policy), ids, chunks)
        expected = masked_by_hand(model, ids, chunks, groups, kept)
        assert torch.allclose(result, expected, atol=SAME_KERNEL, rtol=0)


def test_budgets_by_owner():
    """Two layers that own have budgets of their own, in the order of the model."""
    model, groups = models.tiny_llama(num_hidden_layers=4), [[0, 2, 3]]
    cache = kvplug.SharedCache(model, groups, policy=[Window(6), SinkWindow(2, 8)])
    with SharedTape(model, cache, groups) as tape:
        feed(model, cache, models.tokens(2, 22), CHUNKS)
    assert tape.worst([keep(window=6), keep(sinks=2, window=8, compact=True), keep(), keep()]) < LOGITS
    assert [layer.keys.shape[2] for layer in cache.layers] == [6, 10, 6, 6]


@st.composite
def groupings(draw):
    """Layers 0 to 4 in groups of any size, in order of the model within each."""
    numbers = draw(st.lists(st.integers(0, 4), min_size=5, max_size=5))
    groups = [[i for i in range(5) if numbers[i] == n] for n in sorted(set(numbers))]
    return draw(st.permutations([g for g in groups if len(g) > 1 or draw(st.booleans())]))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(groups=groupings(), ends=st.sets(st.integers(1, 17), max_size=6), rows=st.integers(1, 2))
def test_any_groups_and_any_chunks(groups, ends, rows):
    ends = sorted({*ends, 18})
    chunks = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    model, ids = MODEL, models.tokens(rows, 18)
    result = feed(model, kvplug.SharedCache(model, groups), ids, chunks)
    with torch.no_grad():
        assert torch.allclose(result, by_hand(model, ids, groups), atol=EXACT, rtol=0)


MODEL = deep_llama()
