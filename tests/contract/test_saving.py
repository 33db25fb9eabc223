"""A cache that was written to a file and read again gives exactly what it would have given: after any history, and for
whatever is done with it next. The oracle is the cache itself, which saving must not change either.
"""

import copy

import pytest
import torch

import kvplug
from kvplug.layer import KVLayer
from tests import models
from tests.caches import EVICTING, KEEPING, KINDS, RECORDING, named
from tests.contract.test_hybrids import FAMILIES, UNROUTED
from tests.oracles import feed


def through_a_file(cache, folder, model):
    """The twin of a cache, for another model of the same weights."""
    path = folder / "cache.safetensors"
    cache.save(path)
    twin = kvplug.load(path, model)
    assert type(twin) is type(cache)
    assert [type(layer) for layer in twin.layers] == [type(layer) for layer in cache.layers]
    reprs = [[repr(layer) for layer in one.layers if isinstance(layer, KVLayer)] for one in (cache, twin)]
    assert reprs[0] == reprs[1] != []
    assert twin.get_seq_length() == cache.get_seq_length()
    ours, theirs = cache.memory(), twin.memory()
    assert theirs.used == ours.used
    assert (theirs.keys, theirs.scales, theirs.residual, theirs.tables, theirs.scores, theirs.tokens_kept) == (
        ours.keys, ours.scales, ours.residual, ours.tables, ours.scores, ours.tokens_kept
    )  # fmt: skip
    assert theirs.spare <= ours.spare
    return twin


def assert_alike(pair, ids, chunks, mask=None):
    """Both caches of a pair, each `(model, cache)`, give the same logits bit for bit."""
    one, other = (feed(model, cache, ids, chunks, mask) for model, cache in pair)
    assert torch.equal(one, other)
    assert pair[0][1].memory().used == pair[1][1].memory().used


def batch(padded):
    if not padded:
        return models.tokens(1, 40), None
    _, ids, mask = models.left_padded([5, 14, 9, 1])
    more = models.tokens(4, 26, seed=3)
    return torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)


@pytest.mark.parametrize("padded", [False, True], ids=["one_row", "padded"])
@pytest.mark.parametrize("kind", **named(KINDS))
def test_going_on_from_a_file(model, kind, padded, tmp_path):
    """Saved before anything, after a prompt, in the middle of decoding and after another long forward: what comes next
    equals what the cache gives that was never saved, in steps and in larger forwards."""
    ids, mask = batch(padded)
    straight = kind.make(model)
    expected = feed(model, straight, ids, [14, 1, 1, 9, 1, 1, 3], mask)
    cache, done = kind.make(model), 0
    for chunks in ([], [14], [1, 1], [9], [1]):
        feed(model, cache, ids[:, done : done + sum(chunks)], chunks, mask) if chunks else None
        done += sum(chunks)
        model = models.tiny_llama()
        cache = through_a_file(cache, tmp_path, model)
    rest = feed(model, cache, ids[:, done:30], [1, 3], mask)
    assert torch.equal(rest, expected[:, done:])


@pytest.mark.parametrize("kind", **named(KINDS))
def test_generate_goes_on_to_the_same_tokens(model, kind, tmp_path):
    ids, mask = batch(padded=True)
    ids, mask = ids[:, :14], mask[:, :14]
    arguments = {"do_sample": False, "max_new_tokens": 6, "attention_mask": mask}
    cache = kind.make(model)
    made = model.generate(ids, past_key_values=cache, **arguments)
    other = models.tiny_llama()
    twin = through_a_file(cache, tmp_path, other)
    arguments["attention_mask"] = torch.cat([mask, torch.ones(4, 6, dtype=torch.long)], 1)
    results = [m.generate(made, past_key_values=c, **arguments) for m, c in ((model, cache), (other, twin))]
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_what_else_can_be_done_with_a_loaded_cache(model, kind, tmp_path):
    """Rows are chosen and repeated before and after; a copy goes its own way; it is offloaded; it is reset."""
    ids, mask = batch(padded=True)
    cache = kind.make(model)
    feed(model, cache, ids[:, :16], [14, 1, 1], mask)
    cache.reorder_cache(torch.tensor([1, 1, 0, 3]))
    cache.batch_select_indices(torch.tensor([0, 2, 3]))
    mask = mask[[1, 0, 3]]
    for layer in cache.layers:
        layer.offload()
    other = models.tiny_llama()
    twin = through_a_file(cache, tmp_path, other)
    apart = copy.deepcopy(twin)
    pair = ((model, cache), (other, twin))
    assert_alike(pair, ids[:3, 16:20], [1, 3], mask)
    for _, one in pair:
        one.batch_repeat_interleave(2)
        one.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
    mask = mask.repeat_interleave(2, 0).flip(0)
    assert_alike(pair, models.tokens(6, 6), [4, 1, 1], mask[:, :26])
    assert apart.get_seq_length() == 16
    for _, one in pair:
        one.reset()
        assert one.memory().total == kind.empty_bytes
    assert_alike(pair, models.tokens(2, 15), [12, 1, 2])


@pytest.mark.parametrize("padded", [False, True], ids=["one_row", "padded"])
@pytest.mark.parametrize("removed", [1, 12])
@pytest.mark.parametrize("kind", **named(KEEPING))
def test_cropping_before_and_after(model, kind, removed, padded, tmp_path):
    """What a crop falls back on, the groups that were flushed last, is in the file too."""
    ids, mask = batch(padded)
    cache = kind.make(model)
    feed(model, cache, ids[:, :30], [14, 15, 1], mask)
    cache.crop(-3)
    other = models.tiny_llama()
    twin = through_a_file(cache, tmp_path, other)
    pair = ((model, cache), (other, twin))
    for _, one in pair:
        one.crop(-removed)
    start = 27 - removed
    assert_alike(pair, ids[:, start : start + 9], [1, 7, 1], mask)


@pytest.mark.parametrize("padded", [False, True], ids=["one_row", "padded"])
@pytest.mark.parametrize("kind", **named(RECORDING))
def test_in_the_middle_of_recording(model, kind, padded, tmp_path):
    """A draft that was recorded can be taken back after the file was read."""
    ids, mask = batch(padded)
    cache = kind.make(model)
    feed(model, cache, ids[:, :12], [12], mask)
    cache.activate_past_recording()
    feed(model, cache, ids[:, 12:19], [5, 2], mask)
    other = models.tiny_llama()
    twin = through_a_file(cache, tmp_path, other)
    pair = ((model, cache), (other, twin))
    for _, one in pair:
        one.crop(-4)
    assert_alike(pair, ids[:, 15:20], [1, 4], mask)
    for _, one in pair:
        one.crop(0)
    assert_alike(pair, ids[:, 20:26], [5, 1], mask)


@pytest.mark.parametrize("kind", **named(EVICTING))
def test_tokens_that_attention_never_read(model, kind, tmp_path):
    """Filled by hand: what waits for attention settles, as for all else that looks into a cache."""
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 2, 11, 16, generator=generator) for _ in range(2)]
    cache = kind.make(model)
    for layer in range(2):
        cache.update(*states, layer)
    other = models.tiny_llama()
    twin = through_a_file(cache, tmp_path, other)
    assert_alike(((model, cache), (other, twin)), models.tokens(2, 6), [1, 5])


@pytest.mark.parametrize("kind", **named(KINDS))
def test_initialized_early_and_under_inference_mode(model, kind, tmp_path):
    """Shapes without tokens are kept too. What was loaded under `inference_mode` can be written to outside of it."""
    cache, other = kind.make(model), models.tiny_llama()
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    twin = through_a_file(cache, tmp_path, other)
    assert twin.is_initialized
    ids = models.tokens(2, 20)
    with torch.inference_mode():
        assert_alike(((model, cache), (other, twin)), ids[:, :13], [12, 1])
        twin = through_a_file(cache, tmp_path, other)
    assert_alike(((model, cache), (other, twin)), ids[:, 13:], [1, 4, 2])


SPECS = ["int4:group_size=8,residual=3,sinks=1", "window:window=8+int8", "h2o:budget=8,heads=adaptive"]


MIXED = {**FAMILIES, "gemma3n": models.tiny_gemma3n, "lfm2": models.tiny_lfm2, "jamba": models.tiny_jamba}
# A model whose attention is not routed needs a cache that keeps all tokens.
HYBRIDS = [(family, spec) for family in MIXED for spec in (SPECS if family not in UNROUTED else SPECS[:1])]


@pytest.mark.parametrize(("family", "spec"), HYBRIDS, ids=lambda x: x)
def test_hybrid_models(family, spec, tmp_path):
    """Sliding, linear and convolutional layers, those that borrow and those that keep latents go on as well."""
    model, other = MIXED[family](), MIXED[family]()
    cache = kvplug.from_spec(spec, model)
    ids = models.tokens(2, 30)
    feed(model, cache, ids[:, :20], [11, 1, 8])
    twin = through_a_file(cache, tmp_path, other)
    assert_alike(((model, cache), (other, twin)), ids[:, 20:], [1, 6, 1, 2])


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
def test_a_compressed_context(model, codec, tmp_path):
    cache = kvplug.compress(model, models.tokens(1, 60), 0.4, codec=codec)
    question, other = models.tokens(1, 12, seed=4), models.tiny_llama()
    fresh = through_a_file(cache, tmp_path, models.tiny_llama())
    feed(model, cache, question[:, :5], [5])
    twin = through_a_file(cache, tmp_path, other)
    pair = ((model, cache), (other, twin))
    assert_alike(pair, question[:, 5:], [1, 6])
    for _, one in pair:
        one.reset()
    assert twin.memory() == fresh.memory() == cache.memory()
    for _, one in pair:
        one.batch_repeat_interleave(2)
    assert_alike(pair, models.tokens(2, 9), [8, 1])
    with pytest.raises(ValueError, match="compressed context of 60"):
        twin.crop(-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("spec", ["dense", "fp8", "fp8_e5m2", *SPECS])
def test_half_precision_and_more_than_a_slab(spec, dtype, tmp_path):
    """Longer than the buffers grow at a time, and cropped to below it where that can be: the file is read into less."""
    model, other = (models.tiny_llama().to(dtype) for _ in range(2))
    cache = kvplug.from_spec(spec, model)
    _, ids, mask = models.left_padded([290, 150])
    feed(model, cache, ids, [280, 10], mask)
    if cache.is_croppable:
        cache.crop(-100)
        mask = mask[:, :190]
    twin = through_a_file(cache, tmp_path, other)
    mask = torch.cat([mask, torch.ones(2, 10, dtype=torch.long)], 1)
    ids = torch.cat([ids[:, : mask.shape[1] - 10], models.tokens(2, 10, seed=6)], 1)
    assert_alike(((model, cache), (other, twin)), ids[:, -10:], [1, 8, 1], mask)
