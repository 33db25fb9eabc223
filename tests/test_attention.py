"""What the registered function does with arguments that only the model's own attention understands.

Nothing here goes through a whole model: the function is called as a layer would call it.
"""

import pytest
import torch

import kvplug
from kvplug.attention import attention_forward
from tests import models


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
