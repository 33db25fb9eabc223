"""The contiguous store against a plain list of tokens, and its promises about memory: little is spare, nothing but the
new token is copied, and buffers stay where they are between growths.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvplug
from kvplug.codecs import CODECS
from kvplug.stores import Admission, ContiguousStore
from kvplug.stores.contiguous import capacity_for
from tests import models
from tests.oracles import feed


def block(tokens, batch=2, heads=3, dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, heads, tokens, dim, generator=generator)


def filled(keys, values, tokens=0, **options):
    store = ContiguousStore(CODECS[keys].tokenwise(), CODECS[values].tokenwise(), **options)
    store.allocate(block(0), block(0, dim=8))
    if tokens:
        store.append(block(tokens), block(tokens, dim=8, seed=1))
    return store


def contents(store):
    keys, values = store.view(0, store.length)
    return keys.decode(torch.float32), values.decode(torch.float32)


def once(codec, x):
    codec = CODECS[codec].tokenwise()
    return codec.decode(codec.encode(x), x.dtype)


PAIRS = [("dense", "dense"), ("fp8", "int4"), ("int8", "dense"), ("int4", "int4")]
pairs = pytest.mark.parametrize(("keys", "values"), PAIRS, ids=["-".join(pair) for pair in PAIRS])


@pytest.mark.parametrize("tokens", [*range(1, 40), 255, 256, 257, 1000, 2048, 4095, 4097, 10_000, 100_001, 3_000_000])
def test_spare_capacity_is_small(tokens):
    spare = capacity_for(tokens) - tokens
    assert 0 <= spare <= max(256, tokens // 8)
    assert capacity_for(tokens, limit=tokens) == tokens


def test_growing_token_by_token_never_holds_more_than_the_promise():
    store = filled("int8", "int4")
    copies = 0
    for tokens in range(1, 1500):
        before = store.keys.buffers["codes"].data_ptr()
        store.append(block(1), block(1, dim=8))
        copies += store.keys.buffers["codes"].data_ptr() != before
        held = store.held()
        per_token = (held.keys + held.values + held.scales) / tokens
        assert held.spare <= max(256, tokens / 8) * per_token
        assert (
            sum(t.numel() * t.itemsize for t in store.tensors()) == held.keys + held.values + held.scales + held.spare
        )
    assert copies <= 1500 // 256 + 1, "the buffers moved more often than once a slab"


@pairs
def test_appending_gives_the_tokens_back(keys, values):
    store, k, v = filled(keys, values), block(300), block(300, dim=8, seed=1)
    for start, end in [(0, 7), (7, 8), (8, 250), (250, 251), (251, 300)]:
        store.append(k[:, :, start:end], v[:, :, start:end])
        assert store.length == end
    got_keys, got_values = contents(store)
    assert torch.equal(got_keys, once(keys, k))
    assert torch.equal(got_values, once(values, v))
    assert store.positions is None


@pairs
def test_rows_and_truncation(keys, values):
    store, k, v = filled(keys, values, 9), once(keys, block(9)), once(values, block(9, dim=8, seed=1))
    store.select(torch.tensor([1, 0, 1]))
    store.repeat(2)
    store.truncate(6)
    rows = [1, 1, 0, 0, 1, 1]
    assert torch.equal(contents(store)[0], k[rows, :, :6])
    assert torch.equal(contents(store)[1], v[rows, :, :6])
    store.append(block(2, batch=6, seed=5), block(2, batch=6, dim=8, seed=6))
    assert torch.equal(contents(store)[0], torch.cat([k[rows, :, :6], once(keys, block(2, batch=6, seed=5))], 2))
    store.reset()
    assert store.length == 0
    assert sum(t.numel() for t in store.tensors()) == 0


@pairs
def test_slots_are_written_over(keys, values):
    """An admission moves two of three new tokens, in one row only one of them."""
    store = filled(keys, values, 5, limit=5, tables=("positions",))
    k, v = block(3, seed=7), block(3, dim=8, seed=8)
    slots, source = torch.tensor([[[4, 1]], [[0, 2]]]), torch.tensor([[[0, 2]], [[1, 2]]])
    valid = torch.tensor([[[True, True]], [[True, False]]])
    store.part(2)
    store.put(k, v, Admission(slots, source, valid, source + 5))
    for codec, new, old, got in (
        (keys, k, block(5), contents(store)[0]),
        (values, v, block(5, dim=8, seed=1), contents(store)[1]),
    ):
        expected, fresh = once(codec, old).clone(), once(codec, new)
        expected[0, :, 4], expected[0, :, 1], expected[1, :, 0] = fresh[0, :, 0], fresh[0, :, 2], fresh[1, :, 1]
        assert torch.equal(got, expected)
    assert store.positions.tolist() == [[[0, 7, 2, 3, 5]], [[6, 1, 2, 3, 4]]]


@pairs
def test_positions_are_dropped_from_the_end(keys, values):
    store = filled(keys, values, 5, limit=8, tables=("positions",))
    assert store.positions.tolist() == [[[0, 1, 2, 3, 4]]]
    store.drop_from(3)
    assert store.positions.tolist() == [[[0, 1, 2, -1, -1]]]


class Largest(TorchDispatchMode):
    """The largest tensor that any operation made or wrote, in bytes; views of what is there cost nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                shares = x.untyped_storage().data_ptr() in given
                if not shares or func._schema.is_mutable:
                    self.bytes = max(self.bytes, x.numel() * x.itemsize)
        return result


@pairs
def test_a_step_writes_the_new_token_and_nothing_else(keys, values):
    store = filled(keys, values, 700)
    before = {id(t): t.clone() for t in store.tensors()}
    pointers = [t.data_ptr() for t in store.tensors()]
    k, v = block(1, seed=9), block(1, dim=8, seed=10)
    with Largest() as largest:
        store.append(k, v)
    assert [t.data_ptr() for t in store.tensors()] == pointers
    for tensor in store.tensors():
        old = before[id(tensor)]
        assert torch.equal(tensor[:, :, :700], old[:, :, :700])
        assert torch.equal(tensor[:, :, 701:], old[:, :, 701:])
    # Scratch is for the token itself, a few times over in fp32 at most, and for the small square of a rotation.
    assert largest.bytes <= 16 * k.numel() * 4 < min(t[:, :, :700].numel() for t in store.keys.buffers.values()) * 4


def test_the_same_of_a_whole_cache_s_update():
    """DenseCache: keys of one token come in and views of the buffers go out; nothing of the past is copied."""
    model = models.tiny_llama()
    cache = kvplug.DenseCache(model)
    feed(model, cache, models.tokens(1, 700), [700])
    pointer = cache.layers[0].keys.data_ptr()
    with Largest() as largest:
        keys, values = cache.update(torch.ones(1, 2, 1, 16), torch.ones(1, 2, 1, 16), 0)
    assert largest.bytes <= 2 * 16 * 4
    assert keys.shape == values.shape == (1, 2, 701, 16)
    assert keys.data_ptr() == pointer


def test_a_step_of_an_evicting_cache_moves_no_other_token():
    model = models.tiny_llama()
    cache = kvplug.StreamingLLMCache(model, 2, 300)
    feed(model, cache, models.tokens(1, 500), [400, 50, 1, 49])
    layer = cache.layers[0]
    before = [t.clone() for t in layer.store.tensors()]
    pointers = [t.data_ptr() for t in layer.store.tensors()]
    feed(model, cache, models.tokens(1, 1), [1])
    assert [t.data_ptr() for t in layer.store.tensors()] == pointers
    for tensor, old in zip(layer.store.tensors(), before, strict=True):
        changed = (tensor != old).reshape(*tensor.shape[:3], -1).any(-1).any(0).any(0)
        assert changed.sum() == 1, "one slot is written, the others stay as they are"
