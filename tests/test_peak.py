"""The peak of memory over a prompt and the steps after it, as every live storage of the process is counted: compression
must lower it too, not only what is left in the end.
"""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

import kvplug
from kvplug.view import KVTensor
from tests import models
from tests.oracles import NAME
from tests.walker import bytes_held

LAYERS, PROMPT, STEPS = 24, 1200, 40


class Live(TorchDispatchMode):
    """Storages that operations have made and that are still alive, in bytes, and the most there ever were."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak = {}, 0

    def now(self):
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not isinstance(x, KVTensor):
                storage = x.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return result


@torch.no_grad()
def run(make):
    """Peak of a prompt and greedy steps, live bytes at the end, and the cache."""
    model = models.tiny_llama(num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
                              hidden_size=32, intermediate_size=32)  # fmt: skip
    ids = models.tokens(1, PROMPT)
    with Live() as live:
        cache = make(model)
        for _ in range(STEPS):
            logits = model(ids, logits_to_keep=1, use_cache=True, **{NAME: cache}).logits
            ids = logits.argmax(-1)
        end = live.now()
    return live.peak, end, cache


@pytest.fixture(scope="module")
def default():
    return run(lambda model: DynamicCache())


# Bits of 32 that each keeps per element, spare capacity of the last slab included: 1,240 tokens lie in 1,280.
SHARES = {"fp8": (8 + 16 / 64) / 32, "int8": (8 + 32 / 64) / 32, "int4": (4 + 32 / 64) / 32}


@pytest.mark.parametrize("dtype", SHARES)
def test_the_peak_falls_with_the_bits(default, dtype):
    """What is not the cache (activations of one layer, scratch of encoding one layer) fits in three layers of the
    default cache, so the peak is at most the share of the bits and that."""
    peak, end, cache = run(lambda model: kvplug.QuantCache(model, dtype=dtype))
    dense = bytes_held(default[2])
    assert default[0] >= dense
    assert bytes_held(cache) <= dense * SHARES[dtype] * 1280 / 1240 + 1024
    assert peak <= dense * (SHARES[dtype] * 1280 / 1240 + 3 / LAYERS)
    assert peak < default[0] / 2
    assert end <= bytes_held(cache) + 64 * 1024, "something is alive that the cache does not report"


@pytest.mark.parametrize("codec", [None, "int4"], ids=["exact", "int4"])
def test_the_peak_of_a_window_is_a_few_layers_of_the_prompt(default, codec):
    peak, end, cache = run(lambda model: kvplug.StreamingLLMCache(model, 4, 60, codec=codec))
    assert peak <= bytes_held(default[2]) * 4 / LAYERS + bytes_held(cache)
    assert end <= bytes_held(cache) + 64 * 1024


def test_full_precision_peaks_no_higher_than_the_default_cache(default):
    """The default cache concatenates, so that one layer is there twice; ours grows in slabs of 256 tokens."""
    peak, _, cache = run(lambda model: kvplug.DenseCache(model))
    assert bytes_held(cache) <= bytes_held(default[2]) * 1280 / 1240 + 1024
    assert peak <= default[0] * 1280 / 1240 + bytes_held(default[2]) / LAYERS
