"""The rest of transformers' contract: names of the argument, lengths, reset, copies, iteration, the host and back."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

import kvplug
from tests import models
from tests.caches import EXACT, KEEPING, KINDS, RECORDING, named
from tests.oracles import LOGITS, NAMES, SAME_KERNEL, Keep, feed, greedy_row, row_logits, spans
from tests.tape import Tape


@pytest.mark.parametrize("name", NAMES + ["past_key_values"] * ("past_key_values" not in NAMES))
@pytest.mark.parametrize("kind", **named(EXACT))
def test_both_names_of_the_argument(model, kind, name):
    """`NAMES` holds `cache` only where this transformers knows it; the older name works everywhere."""
    ids = models.tokens(1, 12)
    made = model.generate(ids, **{name: kind.make(model)}, max_new_tokens=8, do_sample=False)
    assert made[0, 12:].equal(greedy_row(model, ids[0], made[0, 12:], kind.keeps))
    cache = kind.make(model)
    with torch.no_grad():
        output = model(ids, **{name: cache})
    assert getattr(output, name) is cache
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("kind", **named(KINDS))
def test_lengths_of_a_new_cache(model, kind):
    cache = kind.make(model)
    assert isinstance(cache, Cache)
    assert len(cache) == 2
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert cache.get_max_length() == -1
    assert cache.is_compileable is False
    assert cache.is_sliding == [False, False]
    assert cache.memory().total == kind.empty_bytes
    assert cache.memory().tokens_kept == 0


@pytest.mark.parametrize("kind", **named(KINDS))
def test_early_initialization_changes_nothing(model, kind):
    """transformers' export recipes call it before the first update."""
    ids, chunks = models.tokens(2, 20), [12, 1, 7]
    expected = feed(model, kind.make(model), ids, chunks)
    cache = kind.make(model)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert cache.is_initialized
    assert cache.get_seq_length() == 0
    assert torch.equal(feed(model, cache, ids, chunks), expected)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_a_reset_cache_is_a_new_one(model, kind):
    """For another prompt, another batch size, with or without padding before: each run equals that of a new object."""
    runs = [(models.tokens(1, 24), None), (models.left_padded([3, 24, 11])[1:]), (models.tokens(2, 24, seed=5), None)]
    cache, chunks = kind.make(model), [12, 1, 1, 10]
    for ids, mask in runs:
        expected = feed(model, kind.make(model), ids, chunks, mask)
        result = feed(model, cache, ids, chunks, mask)
        assert torch.equal(result, expected)
        assert cache.get_seq_length() == 24
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.memory().total == kind.empty_bytes


@pytest.mark.parametrize("kind", **named(RECORDING))
def test_a_reset_in_the_middle_of_recording(model, kind):
    cache = kind.make(model)
    cache.activate_past_recording()
    feed(model, cache, models.tokens(1, 9), [9])
    cache.reset()
    with Tape(model, cache) as tape:
        feed(model, cache, models.tokens(1, 24, seed=1), [12, 1, 11])
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))], ids=["copy", "pickle"])
@pytest.mark.parametrize("kind", **named(KINDS))
def test_a_copy_goes_its_own_way(model, kind, copier):
    """The original and its copy read different suffixes; each equals a cache that read the whole by itself."""
    prefix, chunks = models.tokens(2, 13), [13, 1, 5, 1]
    suffixes = [models.tokens(2, 7, seed=seed) for seed in (30, 31)]
    original = kind.make(model)
    feed(model, original, prefix, [13])
    twin = copier(original)
    for start, end in spans([1, 5, 1]):  # in turn, so that shared state would show
        for cache, suffix in zip((original, twin), suffixes, strict=True):
            feed(model, cache, suffix[:, start:end], [end - start])
    last = models.tokens(2, 1, seed=32)
    for cache, suffix in zip((original, twin), suffixes, strict=True):
        alone = feed(model, kind.make(model), torch.cat([prefix, suffix, last], 1), [*chunks, 1])[:, -1:]
        assert torch.equal(feed(model, cache, last, [1]), alone)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_iterating_gives_keys_and_values_of_each_layer(model, kind):
    """As DynamicCache does: `(keys, values, sliding window or None)`, here of what each head keeps; where heads keep
    different numbers of tokens, zeros behind those of the ones with fewer."""
    ids = torch.randperm(96)[None, :14] + 1  # no token twice, so every value is its own
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        feed(model, cache, ids, [14])
    slow, layers = tape.replay(kind.keeps)[1], list(cache)
    assert len(layers) == 2
    for (keys, values, window), (row,) in zip(layers, slow, strict=True):
        assert window is None
        counts = [len(row.held(head)) for head in range(2)]
        assert keys.shape == values.shape == (1, 2, max(counts), 16)
        for head, count in enumerate(counts):
            for ours, theirs in ((keys[0, head], row.keys[head]), (values[0, head], row.values[head])):
                # Slots need not be in order of time, and rounding differs.
                matches = (ours[:count, None] - theirs[row.held(head)]).abs().amax(-1) < 1e-4
                assert matches.sum(0).eq(1).all() and matches.sum(1).eq(1).all()
                assert not ours[count:].any()


@pytest.mark.parametrize("kind", **named(KINDS))
def test_an_offloaded_layer_comes_back(model, kind):
    """Offloading and fetching between forwards, as transformers' offloading does around each layer."""
    ids, chunks = models.tokens(2, 24), [12, 1, 1, 10]
    expected = feed(model, kind.make(model), ids, chunks)
    cache, results = kind.make(model), []
    for start, end in spans(chunks):
        results.append(feed(model, cache, ids[:, start:end], [end - start]))
        for layer in cache.layers:
            layer.offload()
        if end % 2:
            for layer in cache.layers:
                layer.prefetch()
    assert torch.equal(torch.cat(results, 1), expected)


@pytest.mark.parametrize("kind", **named(KEEPING))
def test_the_bytes_of_a_cropped_cache_do_not_depend_on_what_was_there(model, kind):
    """What was cropped leaves no trace in what comes later, bit for bit."""
    ids = models.tokens(1, 20)
    straight, cropped = kind.make(model), kind.make(model)
    feed(model, straight, ids, [10, 10])
    feed(model, cropped, ids[:, :10], [10])
    feed(model, cropped, models.tokens(1, 6, seed=4) % 96 + 1, [6])
    cropped.crop(-6)
    feed(model, cropped, ids[:, 10:], [10])
    for (keys, values, _), (other_keys, other_values, _) in zip(straight, cropped, strict=True):
        assert torch.equal(keys, other_keys)
        assert torch.equal(values, other_values)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_gradients_are_not_recorded_in_the_cache(model, kind):
    """A forward outside of `no_grad`: what is stored must not hold on to the graph."""
    cache = kind.make(model)
    model(models.tokens(1, 12), past_key_values=cache)
    model(models.tokens(1, 1), past_key_values=cache)
    for layer in cache.layers:
        assert not layer.keys.requires_grad
        assert not layer.values.requires_grad
    feed(model, cache, models.tokens(1, 3), [1, 2])
    assert cache.get_seq_length() == 16


@pytest.mark.parametrize("kind", **named(EXACT))
def test_inference_mode_and_back(model, kind):
    """A prompt read under `inference_mode`, steps outside of it: the buffers must stay writable."""
    ids = models.tokens(1, 16)
    cache = kind.make(model)
    with torch.inference_mode():
        first = model(ids[:, :12], past_key_values=cache).logits
    rest = feed(model, cache, ids[:, 12:], [1, 3])
    expected = row_logits(model, ids[0], [12, 1, 3], kind.keeps)
    assert torch.allclose(torch.cat([first.clone(), rest], 1)[0], expected, atol=LOGITS, rtol=0)


def test_a_cache_made_from_the_config_is_routed_too(model):
    cache = kvplug.WindowCache(model.config, 8)
    ids, chunks = models.tokens(1, 20), [9, 1, 10]
    expected = row_logits(model, ids[0], chunks, Keep(window=8))
    assert torch.allclose(feed(model, cache, ids, chunks)[0], expected, atol=LOGITS, rtol=0)


def test_several_caches_on_one_model_in_turn(model):
    """Every forward is that of the cache it was given, whichever caches were made before or since."""
    ids, chunks = models.tokens(1, 20), [9, 1, 10]
    pairs = [(kind, kind.make(model)) for kind in EXACT]
    plain = DynamicCache()
    results = {kind.name: [] for kind in EXACT}
    default = []
    for start, end in spans(chunks):
        for kind, cache in pairs:
            results[kind.name].append(feed(model, cache, ids[:, start:end], [end - start]))
        default.append(feed(model, plain, ids[:, start:end], [end - start]))
    for kind, _ in pairs:
        expected = row_logits(model, ids[0], chunks, kind.keeps)
        assert torch.allclose(torch.cat(results[kind.name], 1)[0], expected, atol=LOGITS, rtol=0)
    untouched = feed(models.tiny_llama(), DynamicCache(), ids, chunks)
    assert torch.equal(torch.cat(default, 1), untouched)
    assert torch.allclose(untouched, torch.cat(results["dense"], 1), atol=SAME_KERNEL, rtol=0)
