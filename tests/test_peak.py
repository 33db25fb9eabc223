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
from kvplug.kernels import blocks
from kvplug.view import KVTensor
from tests import models
from tests.oracles import NAME
from tests.walker import bytes_held

LAYERS, PROMPT, STEPS = 16, 1020, 8  # the steps cross a boundary of 1,024, where buffers grow
SEEN = PROMPT + STEPS - 1
ROOM = 1280 / SEEN  # slabs of 256 tokens


class Live(TorchDispatchMode):
    """Storages that operations have made and that are still alive, in bytes, and the most there ever were."""

    def __init__(self, model):
        super().__init__()
        self.storages, self.bound, self.peak = {}, 0, 0
        self.weights = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]}

    def now(self):
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        self.bound = sum(size for _, size in self.storages.values())
        return self.bound

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and not isinstance(x, KVTensor):
                storage = x.untyped_storage()
                if storage._cdata in self.weights:
                    continue
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                self.bound += storage.nbytes()
        if self.bound > self.peak:  # counts views and what is gone as well: only then is the true number worth its time
            self.peak = max(self.peak, self.now())
        return result


@torch.no_grad()
def run(make):
    """Peak of a prompt and greedy steps, live bytes at the end, and the cache."""
    model = models.tiny_llama(num_hidden_layers=LAYERS, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
                              hidden_size=32, intermediate_size=32)  # fmt: skip
    ids = models.tokens(1, PROMPT)
    with Live(model) as live:
        cache = make(model)
        for _ in range(STEPS):
            logits = model(ids, logits_to_keep=1, use_cache=True, **{NAME: cache}).logits
            ids = logits.argmax(-1)
        end = live.now()
    return live.peak, end, cache


@pytest.fixture(scope="module")
def default():
    return run(lambda model: DynamicCache())


def layer_bytes(default):
    """One layer of the prompt in full precision, keys and values."""
    return bytes_held(default[2]) / LAYERS


def allowance(default):
    """What else may be alive: what the default cache's run needs beside the cache (the activations of one layer), and
    three times one layer's keys and values, for encoding them in fp32."""
    return default[0] - bytes_held(default[2]) + 3 * layer_bytes(default)


# Bits that each keeps of 32, for 64 channels with 16 bits of scale, and as many of zero point for the integers.
SHARES = {"fp8": (8 + 16 / 64) / 32, "int8": (8 + 32 / 64) / 32, "int4": (4 + 32 / 64) / 32}
# Tokens that stay in full precision: int4's sinks, residual, group, and those of a forward that can be taken back.
PLAIN = {"int4": 4 + 32 + 64 + 8}
# What a run leaves beside its cache: the last logits and tokens, and int4's rotation of 64 channels, which all share.
REST = 4096 + 64 * 64 * 4


@pytest.mark.parametrize("dtype", SHARES)
def test_the_peak_falls_with_the_bits(default, dtype):
    peak, end, cache = run(lambda model: kvplug.QuantCache(model, dtype=dtype))
    dense = bytes_held(default[2])
    held = dense * (SHARES[dtype] * ROOM + PLAIN.get(dtype, 0) / SEEN)
    assert default[0] >= dense
    assert bytes_held(cache) <= held + REST
    assert peak <= held + allowance(default)
    assert peak < default[0] * 0.65
    assert end <= bytes_held(cache) + REST, "something is alive that the cache does not report"


@pytest.mark.parametrize("codec", [None, "int4"], ids=["exact", "int4"])
def test_the_peak_of_a_window_does_not_hold_the_prompt(default, codec):
    peak, end, cache = run(lambda model: kvplug.StreamingLLMCache(model, 4, 60, codec=codec))
    assert peak <= bytes_held(cache) + allowance(default)
    assert end <= bytes_held(cache) + REST


def test_full_precision_peaks_no_higher_than_its_slabs(default):
    """The default cache concatenates, so that one layer is there twice; ours grows by slabs, one buffer at a time."""
    peak, end, cache = run(lambda model: kvplug.DenseCache(model))
    assert bytes_held(cache) <= bytes_held(default[2]) * ROOM + REST
    assert peak <= default[0] + bytes_held(cache) - bytes_held(default[2]) + layer_bytes(default)
    assert end <= bytes_held(cache) + REST


SCORED = ["h2o:budget=64", "h2o:budget=64,heads=adaptive", "snapkv:budget=64", "tova:budget=64+int4"]
SCORED += ["keydiff:budget=64", "knorm:budget=64,heads=adaptive", "expected_attention:budget=64"]


@pytest.mark.parametrize("spec", SCORED)
def test_the_peak_of_scored_tokens_does_not_hold_the_prompt(monkeypatch, default, spec):
    # Attention is read in blocks, here of 64 KiB so that they don't hide what the cache holds.
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 14)
    peak, end, cache = run(lambda model: kvplug.from_spec(spec, model))
    assert peak <= bytes_held(cache) + allowance(default)
    assert end <= bytes_held(cache) + REST
