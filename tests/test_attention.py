"""What the registered function does with arguments that only the model's own attention understands.

Nothing here goes through a whole model: the function is called as a layer would call it.
"""

import pytest
import torch

import kvplug
from kvplug.attention import attention_forward
from tests import models
from tests.oracles import NAME


def call(cache, model, **extra):
    """One query after nine stored tokens; the output and all keys and values, `[1, 2, 10, 16]`, as they were given."""
    generator = torch.Generator().manual_seed(5)
    keys, values = (torch.randn(1, 2, 10, 16, generator=generator) for _ in range(2))
    query = torch.randn(1, 4, 1, 16, generator=generator)
    cache.update(keys[:, :, :9], values[:, :, :9], 0)
    handles = cache.update(keys[:, :, 9:], values[:, :, 9:], 0)
    module = model.model.layers[0].self_attn
    return attention_forward(module, query, *handles, None, scaling=0.25, **extra)[0], query, keys, values


def by_hand(query, keys, values, bias):
    keys, values = keys.double().repeat_interleave(2, 1), values.double().repeat_interleave(2, 1)
    scores = query.double() @ keys.transpose(-1, -2) * 0.25 + bias.double()
    return (scores.softmax(-1) @ values).transpose(1, 2)


# int8 steps are range / 255, at most 0.03 here for keys and values; a score moves by less than 0.1 and the output by
# less than that share of the values' range. Leaving the bias out moves it by more than 0.5.
@pytest.mark.parametrize(
    ("make", "tolerance"),
    [(kvplug.DenseCache, 1e-5), (lambda m: kvplug.QuantCache(m, "int8"), 0.1)],
    ids=["dense", "int8"],
)
def test_a_position_bias_reaches_the_model_s_own_function(make, tolerance):
    model = models.tiny_llama(num_hidden_layers=1)
    bias = 3 * torch.randn(1, 4, 1, 10, generator=torch.Generator().manual_seed(6))
    out, query, keys, values = call(make(model), model, position_bias=bias)
    expected = by_hand(query, keys, values, bias)
    assert (out - expected).abs().max() < tolerance
    assert (by_hand(query, keys, values, torch.zeros_like(bias)) - expected).abs().max() > 0.5


@pytest.mark.parametrize(
    "extra", [{"position_bias": torch.zeros(1, 4, 1, 10)}, {"dropout": 0.1}], ids=["bias", "dropout"]
)
def test_an_evicting_cache_refuses_what_it_can_not_pass_on(extra):
    model = models.tiny_llama(num_hidden_layers=1)
    with pytest.raises(ValueError, match=next(iter(extra))):
        call(kvplug.WindowCache(model, 4), model, **extra)


@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_sparse_attention_is_never_taken_for_full_attention(name):
    """Its models mask what was not picked under the names "eager" and "sdpa" alone, and else pass on what was."""
    x = torch.randn(1, 2, 3, 8)
    with pytest.raises(ValueError, match="sparse attention"):
        attention_forward(torch.nn.Module(), x, x, x, None, **{name: torch.zeros(1, 3, 2, dtype=torch.int32)})
    attention_forward(models.tiny_llama().model.layers[0].self_attn, x, x, x, None, **{name: None})


def test_a_model_with_an_indexer_is_not_routed():
    model = models.tiny_llama()
    model.model.layers[1].self_attn.indexer = torch.nn.Linear(2, 2)
    before = model.config._attn_implementation
    cache = kvplug.DenseCache(model)
    assert model.config._attn_implementation == before
    ids = models.tokens(1, 9)
    assert torch.allclose(model(ids, **{NAME: cache}).logits, model(ids).logits, atol=1e-5)
    with pytest.raises(ValueError, match="attention code"):
        kvplug.WindowCache(model, 4)
