"""The stores of first and last tokens in full precision and groups in between: against the rule written out, however
the tokens come in, row by row, and after every crop.
"""

import copy
import warnings

import pytest
import torch

import kvplug
from kvplug.codecs import PerChannel, PerToken, Plain, Rotated, base, rotated
from kvplug.residual import ResidualLayer
from kvplug.stores import RaggedStore
from kvplug.stores.contiguous import has_outlier
from kvplug.stores.residual import UNDO
from tests import models
from tests.oracles import feed
from tests.stores.test_contiguous import Largest, block
from tests.walker import bytes_held

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 200]
# Codecs of keys and values, residual, sinks and the group that follows.
SETTINGS = {
    "rotated": (Rotated(4, 16), Rotated(4, 16), 32, 4, 16),
    "unlike_groups": (Rotated(3, 8), Rotated(2, 16), 5, 0, 16),
    "channel": (PerChannel(4, 10), PerToken(4), 0, 3, 10),
    "no_groups": (PerToken(8), PerToken(4), 32, 4, 16),
    "one_side": (Plain(), Rotated(4, 64), 32, 0, 64),
}
settings = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)


def layer_of(setting):
    return ResidualLayer(*setting[:4])


def states(tokens, batch=2, seed=0):
    return block(tokens, batch, seed=seed), block(tokens, batch, dim=8, seed=seed + 1)


def fed(layer, keys, values, chunks, start=0):
    for chunk in chunks:
        layer.update(keys[:, :, start : start + chunk], values[:, :, start : start + chunk])
        layer.settle()
        start += chunk
    return layer


def feedings(length):
    """At once, one by one, and mixed."""
    mixed, sizes = [], [7, 1, 1, 30, 2, 64, 1, 9]
    while sum(mixed) < length:
        mixed.append(min(sizes[len(mixed) % 8], length - sum(mixed)))
    return [length], [1] * length, mixed


def settled(length, setting):
    _, _, residual, sinks, group = setting
    return sinks + group * (max(length - residual - sinks, 0) // group)


def by_the_rule(setting, *sides):
    """What must come back of keys and values."""
    length, sinks = sides[0].shape[2], setting[3]
    end = settled(length, setting)
    return [
        torch.cat([x[:, :, :sinks], codec.decode(codec.encode(x[:, :, sinks:end]), x.dtype), x[:, :, end:]], dim=2)
        if end > sinks
        else x
        for codec, x in zip(setting[:2], sides, strict=True)
    ]


def codes(layer):
    return [x for side in layer.store.encoded.view(0, layer.store.encoded.length) for x in side.tensors()]


@settings
@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_held_does_not_depend_on_the_feeding(setting, length):
    keys, values = states(length)
    expected = by_the_rule(setting, keys, values)
    first = None
    for chunks in feedings(length):
        layer = fed(layer_of(setting), keys, values, chunks)
        assert torch.equal(layer.keys, expected[0]), chunks
        assert torch.equal(layer.values, expected[1]), chunks
        assert layer.store.encoded.length == max(settled(length, setting) - setting[3], 0)
        first = first or layer
        assert all(torch.equal(a, b) for a, b in zip(codes(layer), codes(first), strict=True))
        assert layer.store.held() == first.store.held()
        assert bytes_held(layer) == bytes_held(first)
    residual = setting[2]
    assert torch.equal(first.keys[:, :, max(length - residual, 0) :], keys[:, :, max(length - residual, 0) :])


@settings
def test_codes_of_old_tokens_never_change_and_buffers_stay(setting):
    keys, values = states(230)
    layer = fed(layer_of(setting), keys, values, [90])
    for step in range(90, 230):
        before = [x.clone() for x in codes(layer)]
        fed(layer, keys, values, [1], step)
        for old, new in zip(before, codes(layer), strict=True):
            assert torch.equal(old, new[:, :, : old.shape[2]])


def test_a_step_moves_no_more_than_the_tail():
    """Between flushes it writes its own token; at a flush and after it the group and the tail are touched."""
    setting = SETTINGS["rotated"]
    _, _, residual, _, group = setting
    keys, values = states(600)
    layer = fed(layer_of(setting), keys, values, [400])
    token = keys[:, :, :1].numel() * 4
    sizes = []
    for step in range(400, 480):
        pointers = [x.data_ptr() for x in layer.store.tensors()]
        with Largest() as largest:
            fed(layer, keys, values, [1], step)
        assert [x.data_ptr() for x in layer.store.tensors()] == pointers
        sizes.append(largest.bytes)
    # A flush, and in the next step the tail is moved; the first step moves what the prompt left.
    assert sum(size > token for size in sizes) == 2 * 80 // group + 1
    assert max(sizes) <= 16 * 2 * max(residual, group) * token  # encoding both sides, with all distances to 16 levels


@pytest.mark.parametrize("removed", range(1, UNDO + 1))
@settings
def test_the_last_tokens_of_a_forward_were_never_there(setting, removed):
    """Crops at every phase of a group, each followed by more tokens: as if they had never been, codes included."""
    keys, values = states(120)
    wrong = states(removed, seed=7)
    for length in range(60, 60 + setting[4] + 1):
        layer = fed(layer_of(setting), keys, values, [length])
        fed(layer, *wrong, [removed])
        layer.crop(-removed)
        straight = fed(layer_of(setting), keys, values, [length])
        assert torch.equal(layer.keys, straight.keys)
        assert layer.store.held().residual == straight.store.held().residual
        fed(layer, keys, values, [1, 3, 20], length)
        fed(straight, keys, values, [24], length)
        assert all(torch.equal(a, b) for a, b in zip(codes(layer), codes(straight), strict=True))
        assert torch.equal(layer.values, straight.values)


@pytest.mark.parametrize("length", [0, 2, 5, 17, 36, 50, 67, 90, 119])
@settings
def test_a_crop_into_what_is_encoded(setting, length):
    """Whole groups stay as they are; what remains of a cut one goes on from what its codes gave back."""
    sinks, group = setting[3], setting[4]
    keys, values = states(120)
    layer = fed(layer_of(setting), keys, values, [70, 50])
    held = [layer.keys[:, :, :length], layer.values[:, :, :length]]
    before = [x.clone() for x in codes(layer)]
    layer.crop(length - 120)
    assert torch.equal(layer.keys, held[0]) and torch.equal(layer.values, held[1])
    whole = group * (max(min(length, settled(120, setting)) - sinks, 0) // group)
    assert layer.store.encoded.length <= whole
    for old, new in zip(before, codes(layer), strict=True):
        assert torch.equal(old[:, :, : new.shape[2]], new)
    more = states(100, seed=9)
    fed(layer, *more, [1, 1, 60, 38])
    assert layer.get_seq_length() == length + 100
    for got, old, new in ((layer.keys, held[0], more[0]), (layer.values, held[1], more[1])):
        assert torch.equal(got[:, :, : min(sinks, length)], old[:, :, : min(sinks, length)])
        assert torch.equal(got[:, :, -setting[2] :] if setting[2] else got[:, :, :0], new[:, :, 100 - setting[2] :])


@settings
def test_recorded_tokens_of_any_number_were_never_there(setting):
    keys, values = states(200)
    layer = fed(layer_of(setting), keys, values, [80])
    layer.activate_past_recording()
    fed(layer, *states(90, seed=3), [1, 40, 2, 47])
    layer.crop(-90)
    fed(layer, keys, values, [5, 60], 80)
    layer.crop(0)
    straight = fed(layer_of(setting), keys, values, [145])
    assert torch.equal(layer.keys, straight.keys)
    assert all(torch.equal(a, b) for a, b in zip(codes(layer), codes(straight), strict=True))


@settings
def test_rows_move_with_all_they_hold(setting):
    keys, values = states(150, batch=3)
    layer = fed(layer_of(setting), keys, values, [100, 1, 1])
    layer.batch_repeat_interleave(2)
    layer.reorder_cache(torch.tensor([5, 0, 3, 3, 1, 2]))
    layer.batch_select_indices(torch.tensor([0, 2]))
    rows = torch.tensor([2, 1])
    fed(layer, keys[rows], values[rows], [1] * 20 + [28], 102)
    assert torch.equal(layer.keys, by_the_rule(setting, keys[rows], values[rows])[0])
    layer.reset()
    fed(layer, keys, values, [150])
    assert torch.equal(layer.values, by_the_rule(setting, keys, values)[1])


# Rows of different lengths


def padded(layer, keys, values, mask, chunks):
    """As `fed`, with a mask `[batch, tokens]`."""
    start = 0
    for chunk in chunks:
        end = start + chunk
        layer.update(keys[:, :, start:end], values[:, :, start:end])
        layer.settle(mask[:, :end])
        start = end
    return layer


MASKS = {
    "left": lambda tokens: torch.arange(tokens)[None] >= torch.tensor([[0], [3], [61], [tokens - 2]]),
    "middle": lambda tokens: (
        (torch.arange(tokens)[None] < 20)
        | (torch.arange(tokens)[None] >= torch.tensor([[20], [23], [81], [tokens - 9]]))
    ),
}
CHUNKS = [[130], [70, 1, 1, 1, 57], [1] * 130, [5] * 26, [20, 61] + [1] * 49]


def check_rows(layer, setting, keys, values, mask):
    for row in range(len(mask)):
        real = mask[row, : layer.get_seq_length()]
        columns = real.nonzero()[:, 0]
        alone = by_the_rule(setting, keys[row : row + 1, :, columns], values[row : row + 1, :, columns])
        assert torch.equal(layer.keys[row][:, columns], alone[0][0]), row
        assert torch.equal(layer.values[row][:, columns], alone[1][0]), row


@pytest.mark.parametrize("chunks", CHUNKS, ids=["at_once", "turns", "one_by_one", "fives", "prefix"])
@pytest.mark.parametrize("kind", MASKS)
@settings
def test_each_row_is_what_it_is_alone(setting, kind, chunks):
    keys, values = states(130, batch=4)
    mask = MASKS[kind](130)
    layer = padded(layer_of(setting), keys, values, mask, chunks)
    assert isinstance(layer.store, RaggedStore)
    check_rows(layer, setting, keys, values, mask)


@pytest.mark.parametrize("kind", MASKS)
@settings
def test_padded_rows_move_and_are_cropped(setting, kind):
    keys, values = states(130, batch=4)
    mask = MASKS[kind](130)
    for removed in (1, 5, UNDO):
        layer = padded(layer_of(setting), keys[:, :, :100], values[:, :, :100], mask, [90, 1, 9])
        twin = copy.deepcopy(layer)
        fed(layer, *states(removed, batch=4, seed=5), [removed])
        layer.crop(-removed)
        assert torch.equal(layer.keys, twin.keys)
        layer.reorder_cache(torch.tensor([2, 2, 0, 3]))
        rows = torch.tensor([2, 2, 0, 3])
        fed(layer, keys[rows], values[rows], [1, 10, 19], 100)
        check_rows(layer, setting, keys[rows], values[rows], (mask | (torch.arange(130) >= 100))[rows])


@pytest.mark.parametrize("length", [0, 2, 19, 64, 90, 110])
@pytest.mark.parametrize("kind", MASKS)
@settings
def test_a_deep_crop_of_padded_rows(setting, kind, length):
    """What is left stays as it was, or is what came in where that was still there."""
    keys, values = states(130, batch=4)
    mask = MASKS[kind](130)
    layer = padded(layer_of(setting), keys, values, mask, [100, 30])
    held = layer.keys[:, :, :length], layer.values[:, :, :length]
    layer.crop(length - 130)
    for got, old, raw in ((layer.keys, held[0], keys), (layer.values, held[1], values)):
        assert ((got == old) | (got == raw[:, :, :length])).all()
    fed(layer, *states(90, batch=4, seed=9), [1, 1, 60, 28])
    new = states(90, batch=4, seed=9)[0]
    residual = setting[2]
    assert torch.equal(layer.keys[:, :, length + 90 - residual :], new[:, :, 90 - residual :])
    # As codes give them back: within the coarsest of the codecs, 2 bits.
    assert (layer.keys[:, :, length:] - new).abs().amax() < 3


# Memory


@pytest.mark.parametrize("spec", ["int4", "int2:group_size=16,residual=7,sinks=1", "quant:keys=int8,values=int3"])
def test_plan_and_storages_over_many_lengths(spec):
    config = models.tiny_llama().config
    cache = kvplug.from_spec(spec, models.tiny_llama())
    for length in range(1, 420):
        for layer in range(2):
            cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), layer)
        if length % 7 == 0 or length < 80:
            report = cache.memory()
            assert report == kvplug.plan(config, spec, length)
            assert report.total == bytes_held(cache)


# Input that few bits can't hold


def test_a_layer_that_refuses_takes_the_others_back(model):
    cache = kvplug.QuantCache(model, group_size=8, residual=4, sinks=2)
    ids = models.tokens(1, 50)
    feed(model, cache, ids, [40])
    before = [layer.keys for layer in cache.layers]
    keys = torch.randn(1, 2, 5, 16)
    cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match="not finite"):
        cache.update(keys, keys / 0, 1)
    assert [layer.seen for layer in cache.layers] == [40, 40]
    assert all(torch.equal(layer.keys, x) for layer, x in zip(cache.layers, before, strict=True))


def test_reading_the_contents_changes_nothing(model):
    """What a crop falls back on is still there afterwards."""
    found = []
    for read in (False, True):
        cache = kvplug.QuantCache(model)
        feed(model, cache, models.tokens(1, 101), [99, 2])
        if read:
            assert cache.layers[0].keys.shape[2] == 101
        cache.crop(-2)
        found.append(cache.layers[0].keys)
    assert torch.equal(*found)


def test_another_default_dtype(model):
    """What torch makes new tensors of where nobody says is no affair of a cache's."""
    ids = models.tokens(1, 150)
    specs = ("int8", "fp8", "int4", "quant:dtype=int3,scheme=lloyd_max")
    expected = [feed(model, kvplug.from_spec(spec, model), ids, [140, 10]) for spec in specs]
    base.hadamard.cache_clear(), rotated.levels.cache_clear(), rotated.factors.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        found = [feed(model, kvplug.from_spec(spec, model), ids, [140, 10]) for spec in specs]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("first", [1, 4, 100])
def test_outliers_are_found_in_a_first_block_of_any_length(model, first):
    cache = kvplug.QuantCache(model, "int8")
    keys = torch.randn(1, 2, 100, 16)
    keys[:, :, :, 3] += 500
    with pytest.warns(UserWarning, match="layers 0"):
        for chunk in (keys[:, :, :first], keys[:, :, first:], keys[:, :, :1]):
            cache.update(chunk, chunk, 0)
    assert torch.equal(cache.layers[0].keys[:, :, :100], keys)


def test_channels_of_zeros_make_no_outliers_of_the_others():
    keys = torch.randn(1, 2, 150, 16)
    keys[..., :9] = 0
    assert not has_outlier(keys)


LOUD = {
    "groups": lambda m: kvplug.QuantCache(m, "int4", group_size=8, residual=4, sinks=2),
    "token_by_token": lambda m: kvplug.QuantCache(m, "int8"),
    "roomy_window": lambda m: kvplug.WindowCache(m, 64, codec="int4"),
    "window": lambda m: kvplug.WindowCache(m, 16, codec="int4"),
}


@pytest.mark.parametrize("make", LOUD.values(), ids=LOUD)
def test_a_channel_of_outliers_is_kept_and_named(model, make):
    """As the biases of Qwen2.5's first and last layers make it."""
    cache = make(model)
    keys, values = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    loud = keys.clone()
    loud[:, 1, :, 3] += 500
    with pytest.warns(UserWarning, match=r"layers 1 .*layer_dtypes") as seen:
        for start, stop in ((0, 30), (30, 31), (31, 40)):
            cache.update(keys[:, :, start:stop], values[:, :, start:stop], 0)
            cache.update(loud[:, :, start:stop], values[:, :, start:stop], 1)
    assert len(seen) == 1
    kept = cache.layers[1].keys.shape[2]
    # A window's slots are written over; which token lies where is not the question here.
    assert torch.equal(cache.layers[1].keys[0, 1, :, 3].sort().values, loud[0, 1, 40 - kept :, 3].sort().values)
    assert not torch.isin(cache.layers[0].keys[0, 1, :, 3], keys[0, 1, :, 3]).all()
    assert not torch.isin(cache.layers[1].values[0, 1, :, 3], values[0, 1, :, 3]).all()
    report = cache.memory()
    assert report.total == bytes_held(cache)
    cache.reset()
    assert [layer.store.kept_plain for layer in cache.layers] == [False, False]


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4"])
def test_a_key_bias_of_500_does_not_change_what_attention_sees(dtype):
    """One channel of all keys is offset by 500 in a whole model, which then says what it says with a full cache."""
    model = models.tiny_llama(attention_bias=True)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[5] += 500
    ids = models.tokens(1, 120)
    exact = feed(model, kvplug.DenseCache(model), ids, [100, 20])
    with pytest.warns(UserWarning, match="layers 0, 1 "):
        found = feed(model, kvplug.QuantCache(model, dtype, values="dense"), ids, [100, 10, 10])
    # fp32 rounds scores of some thousands to 2**-12, in another order each time.
    assert torch.allclose(found, exact, atol=5e-3, rtol=0)


def test_nothing_that_is_not_finite_is_encoded_token_by_token(model):
    """It is refused before anything has changed."""
    cache = kvplug.QuantCache(model, "int8")
    keys, values = torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
    cache.update(keys, values, 0)
    before = cache.layers[0].keys
    wrong = values.clone()
    wrong[0, 1, 3, 7] = float("inf")
    with pytest.raises(ValueError, match="value_states has numbers that are not finite"):
        cache.update(keys, wrong, 0)
    assert torch.equal(cache.layers[0].keys, before)
    assert cache.get_seq_length() == 9


def test_ordinary_keys_warn_of_nothing(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, kvplug.QuantCache(model, group_size=8, residual=4, sinks=2), models.tokens(1, 40), [20, 1, 19])


@pytest.mark.parametrize("side", ["key_states", "value_states"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")], ids=str)
@settings
def test_numbers_that_are_not_finite(setting, side, bad):
    """They are refused before anything has changed."""
    keys, values = states(200)
    layer = fed(layer_of(setting), keys, values, [80])
    wrong = [x.clone() for x in states(100, seed=4)]
    wrong[side == "value_states"][0, 0, 10, 2] = bad
    with pytest.raises(ValueError, match=side):
        layer.update(*wrong)
    fed(layer, keys, values, [1, 60, 59], 80)
    assert torch.equal(layer.keys, by_the_rule(setting, keys, values)[0])
