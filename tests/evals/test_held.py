"""The count of bytes held: every storage once, views in full, tensor subclasses by what is inside them."""

from dataclasses import dataclass

import pytest
import torch
from transformers import DynamicCache, QuantizedCache

import kvplug
from evals import held
from evals.held import held_bytes


def test_a_storage_counts_once_however_often_it_is_reached():
    x = torch.zeros(256)
    assert held_bytes([x, x, x[:3], {"again": (x.view(16, 16),)}]) == 1024


def test_a_small_view_pins_all_of_its_storage():
    assert held_bytes(torch.zeros(256)[:1]) == 1024


def test_attributes_slots_sets_and_bound_methods_are_followed():
    class Slots:
        __slots__ = ("x",)

        def __init__(self):
            self.x = torch.zeros(256)

        def method(self):
            return self.x

    @dataclass
    class Plain:
        slots: Slots
        method: object
        kinds: frozenset

    assert held_bytes(Plain(Slots(), Slots().method, frozenset([torch.zeros(256)]))) == 3 * 1024


def test_cycles_end():
    loop = [torch.zeros(256)]
    loop.append(loop)
    assert held_bytes(loop) == 1024


def test_what_belongs_to_the_model_is_not_the_caches():
    model = torch.nn.Linear(16, 16)
    cache = {"model": model, "weight": model.weight[:2], "own": torch.zeros(256)}
    assert held_bytes(cache, outside=model) == 1024


def test_meta_tensors_and_empty_ones_hold_nothing():
    assert held_bytes([torch.empty(99, device="meta"), torch.empty(0), None, "text", 3]) == 0


class Wrapper(torch.Tensor):
    """A wrapper subclass: its own storage is a pretence of full precision."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, (4096,), dtype=torch.float32)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(function)


def test_a_tensor_subclass_counts_what_is_inside_it():
    assert held_bytes([Wrapper(torch.zeros(256))]) == 1024


@pytest.mark.parametrize("backend", ["dynamic", "hqq"])
def test_transformers_caches_by_hand(tiny, backend):
    cache = DynamicCache() if backend == "dynamic" else QuantizedCache("hqq", tiny.model.config, nbits=4)
    for layer in range(2):
        cache.update(torch.randn(1, 2, 128, 16), torch.randn(1, 2, 128, 16), layer)
    elements = 2 * 2 * 2 * 128 * 16
    if backend == "dynamic":
        assert held_bytes(cache, outside=tiny.model) == 4 * elements
    else:
        # Half a byte an element, and a scale and a zero point in float32 for each group of 64.
        assert held_bytes(cache, outside=tiny.model) == elements // 2 + elements // 64 * 8


def test_a_cache_is_counted_beside_the_full_one(tiny):
    """Ours tells nothing of its elements: to look at them would decode the whole cache."""
    keys = torch.randn(1, 2, 256, 16)
    full, own = DynamicCache(config=tiny.model.config), kvplug.DenseCache(tiny.model)
    for cache in (full, own):
        for index in range(2):
            cache.update(keys, keys.clone(), index)
    counted = [held.counted(cache, tiny.model, 256) for cache in (full, own)]
    assert [one["elements"] for one in counted] == [2 * 2 * 2 * 256 * 16, None]
    beside = held.beside(counted[1], counted[0])
    assert (beside["elements"], beside["bits_held"], beside["of_full"]) == (2 * 2 * 2 * 256 * 16, 32, 1)
    assert beside["report_agrees"]
