"""Bad input raises a ValueError that names the argument and its value and says what is accepted; nothing changes."""

import pytest
import torch
import transformers

import kvplug
from kvplug.codecs import Rotated
from kvplug.policies import SinkWindow, Window
from tests import models

WRONG = {
    "dtype": (lambda m: kvplug.QuantCache(m, dtype="int5"), ["dtype", "int5", "int4", "int8", "fp8"]),
    "keys": (lambda m: kvplug.QuantCache(m, keys="in4"), ["keys", "in4", "int4"]),
    "values": (lambda m: kvplug.QuantCache(m, values="fp16x"), ["values", "fp16x", "fp8"]),
    "dtype_that_is_a_number": (lambda m: kvplug.QuantCache(m, 8), ["dtype", "8", "int8"]),
    "layer_dtypes_that_is_a_list": (lambda m: kvplug.QuantCache(m, layer_dtypes=["int8"]), ["layer_dtypes", "int8"]),
    "group_size_of_nothing": (
        lambda m: kvplug.QuantCache(m, keys="int8", values="int4", group_size=8),
        ["group_size", "8", "int8", "int4", "None"],
    ),
    "scheme": (lambda m: kvplug.QuantCache(m, scheme="kivi"), ["scheme", "kivi", "channel", "rotated"]),
    "scheme_of_fp8": (lambda m: kvplug.QuantCache(m, "fp8", scheme="channel"), ["scheme", "fp8", "int4"]),
    "group_size_zero": (lambda m: kvplug.QuantCache(m, group_size=0), ["group_size", "0"]),
    "group_size_of_int8": (lambda m: kvplug.QuantCache(m, "int8", group_size=8), ["group_size", "8"]),
    "groups_that_do_not_divide": (lambda m: kvplug.KVCache(m, codec=(Rotated(4, 8), Rotated(4, 12))), ["8", "12"]),
    "residual_negative": (lambda m: kvplug.QuantCache(m, residual=-1), ["residual", "-1", "0"]),
    "residual_fraction": (lambda m: kvplug.QuantCache(m, residual=1.5), ["residual", "1.5"]),
    "quant_sinks_negative": (lambda m: kvplug.QuantCache(m, sinks=-1), ["sinks", "-1", "0"]),
    "residual_under_a_policy": (
        lambda m: kvplug.KVCache(m, codec="int4", policy=Window(8), residual=4),
        ["residual=4", "Window(window=8)", "policy"],
    ),
    "sinks_under_a_policy": (
        lambda m: kvplug.KVCache(m, codec="int4", policy=Window(8), sinks=0),
        ["sinks=0", "policy"],
    ),
    "residual_of_nothing": (lambda m: kvplug.KVCache(m, residual=4), ["residual=4", "codec"]),
    "layer_dtypes_index": (lambda m: kvplug.QuantCache(m, layer_dtypes={2: "int8"}), ["layer_dtypes", "2", "0, 1"]),
    "layer_dtypes_name": (lambda m: kvplug.QuantCache(m, layer_dtypes={"first": "int8"}), ["layer_dtypes", "first"]),
    "layer_dtypes_dtype": (
        lambda m: kvplug.QuantCache(m, layer_dtypes={0: "int5"}),
        ["layer_dtypes[0]", "int5", "int8"],
    ),
    "codec": (lambda m: kvplug.KVCache(m, codec="zip"), ["codec", "zip", "int4"]),
    "codec_of_window": (lambda m: kvplug.WindowCache(m, 8, codec="zip"), ["codec", "zip", "int4"]),
    "policy": (lambda m: kvplug.KVCache(m, policy="window"), ["policy", "window"]),
    "policy_number": (lambda m: kvplug.KVCache(m, policy=8), ["policy", "8"]),
    "policies_too_few": (lambda m: kvplug.KVCache(m, policy=[Window(8)]), ["policy", "1", "2"]),
    "policies_too_many": (lambda m: kvplug.KVCache(m, policy=[Window(8)] * 3), ["policy", "3", "2"]),
    "windows_too_many": (lambda m: kvplug.WindowCache(m, [4, 5, 6]), ["3", "2"]),
    "lists_of_two_lengths": (lambda m: kvplug.StreamingLLMCache(m, [1, 2], [4, 5, 6]), ["[1, 2]", "[4, 5, 6]"]),
    "window_zero": (lambda m: kvplug.WindowCache(m, 0), ["window", "0", "1"]),
    "window_negative": (lambda m: kvplug.WindowCache(m, -4), ["window", "-4", "1"]),
    "window_fraction": (lambda m: kvplug.WindowCache(m, 0.5), ["window", "0.5"]),
    "window_text": (lambda m: kvplug.WindowCache(m, "8"), ["window", "8"]),
    "window_true": (lambda m: kvplug.WindowCache(m, True), ["window", "True"]),
    "window_none": (lambda m: kvplug.WindowCache(m, None), ["window", "None"]),
    "window_zero_in_a_list": (lambda m: kvplug.WindowCache(m, [8, 0]), ["window", "0", "1"]),
    "streaming_window_zero": (lambda m: kvplug.StreamingLLMCache(m, 4, 0), ["window", "0", "1"]),
    "sinks_negative": (lambda m: kvplug.StreamingLLMCache(m, -1, 8), ["sinks", "-1", "0"]),
    "sinks_fraction": (lambda m: kvplug.StreamingLLMCache(m, 1.5, 8), ["sinks", "1.5"]),
    "positions": (
        lambda m: kvplug.StreamingLLMCache(m, 2, 6, positions="new"),
        ["positions", "new", "compact", "original"],
    ),
    "policy_window": (lambda m: Window(0), ["window", "0"]),
    "policy_sinks": (lambda m: SinkWindow(-2, 4), ["sinks", "-2"]),
}


@pytest.mark.parametrize(("make", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument(model, make, words):
    with pytest.raises(ValueError) as error:
        make(model)
    for word in words:
        assert word in str(error.value)
    assert model.config._attn_implementation == "sdpa", "a cache that was not made must not route the model"


@pytest.mark.parametrize(
    "thing", [None, "gpt2", 7, torch.nn.Linear(2, 2), {}], ids=["none", "name", "number", "module", "dict"]
)
def test_neither_a_model_nor_a_config(thing):
    for make in (kvplug.DenseCache, kvplug.attach, kvplug.detach):
        with pytest.raises(ValueError, match="model or"):
            make(thing)


def test_a_config_without_attention_layers():
    config = transformers.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2)
    with pytest.raises(ValueError, match="MambaConfig"):
        kvplug.DenseCache(config)
    with pytest.raises(ValueError, match="MambaConfig"):
        kvplug.plan(config, "int4", 100)


def test_a_rotation_that_can_t_be_repeated_refuses_compact_positions():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = models.tiny_llama(rope_parameters=rope)
    with pytest.raises(ValueError, match=r"dynamic.*original"):
        kvplug.StreamingLLMCache(model, 2, 6)
    kvplug.StreamingLLMCache(model, 2, 6, positions="original")
    kvplug.StreamingLLMCache(model, 0, 8)  # without sinks nothing is rotated


def test_latent_attention_refuses_compact_positions():
    with pytest.raises(ValueError, match="original"):
        kvplug.StreamingLLMCache(models.tiny_deepseek(), 2, 6)


TYPOS = {
    "": "spec",
    "+": "''",
    "int5": "int5",
    "Int4": "Int4",
    "int4++int8": "''",
    "int4+int8": "int8",
    "int4:group=8": "group",
    "quant:keys=int3x": "int3x",
    "int4:residual=few": "few",
    "int4:sinks=-1": "sinks",
    "dense:residual=4": "residual",
    "int8:group_size=8": "group_size",
    "window:window=8+int4:residual=4": "residual",
    "window": "window",
    "window:8": "8",
    "window:window": "window",
    "window:window=0": "0",
    "window:window=1e3": "1e3",
    "window:window=8,size=9": "size",
    "window:window=8,window=9": "window=9",
    "window:window=8+streaming": "streaming",
    "streaming:sinks=2,windw=6": "windw",
    "streaming:positions=none": "none",
    "dense,int4": "dense,int4",
}


@pytest.mark.parametrize(("spec", "word"), TYPOS.items(), ids=[spec or "empty" for spec in TYPOS])
def test_a_spec_with_a_typo(model, spec, word):
    for make in (lambda: kvplug.from_spec(spec, model), lambda: kvplug.plan(model.config, spec, 10)):
        with pytest.raises(ValueError) as error:
            make()
        assert word in str(error.value)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("spec", ["int5", "windw:window=8", "streamingllm"])
def test_a_typo_in_a_name_lists_the_names(model, spec):
    with pytest.raises(ValueError) as error:
        kvplug.from_spec(spec, model)
    for name in ("dense", "fp8", "int8", "int4", "quant", "window", "streaming"):
        assert name in str(error.value)


@pytest.mark.parametrize("spec", [None, 4, ["int4"]], ids=["none", "number", "list"])
def test_a_spec_that_is_no_string(model, spec):
    with pytest.raises(ValueError, match="spec"):
        kvplug.from_spec(spec, model)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((-1,), "tokens"), ((1.5,), "tokens"), ((10, 0), "batch"), ((10, -2), "batch"), (("10",), "tokens")],
    ids=str,
)
def test_wrong_numbers_to_plan(model, arguments, name):
    with pytest.raises(ValueError, match=name):
        kvplug.plan(model.config, "int4", *arguments)


def update_shapes(cache, keys, values):
    cache.update(torch.zeros(keys), torch.zeros(values), 0)


@pytest.mark.parametrize(
    ("keys", "values"),
    [((2, 2, 3, 16), (1, 2, 3, 16)), ((1, 2, 3, 16), (1, 2, 4, 16)), ((1, 2, 3, 8), (1, 2, 3, 16)),
     ((2, 3, 16), (2, 3, 16)), ((3, 2, 1, 16), (3, 2, 1, 16)), ((1, 4, 1, 16), (1, 4, 1, 16))],
    ids=["batches_differ", "tokens_differ", "other_width", "three_dimensions", "other_batch", "other_heads"],
)  # fmt: skip
@pytest.mark.parametrize("spec", ["dense", "int4", "window:window=8+int8"])
def test_shapes_that_do_not_fit(model, spec, keys, values):
    cache = kvplug.from_spec(spec, model)
    update_shapes(cache, (1, 2, 5, 16), (1, 2, 5, 16))
    with pytest.raises(ValueError, match="key_states"):
        update_shapes(cache, keys, values)
    assert cache.get_seq_length() == 5
    update_shapes(cache, (1, 2, 2, 16), (1, 2, 2, 16))
    assert cache.get_seq_length() == 7


@pytest.mark.parametrize("layer", [-1, 2, 9])
def test_a_layer_that_is_not_there(model, layer):
    cache = kvplug.DenseCache(model)
    with pytest.raises(ValueError, match="layer_idx"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), layer)


def test_a_mask_that_is_too_short(model):
    """After eviction a caller may think that the mask should have as many columns as are kept. (A 2D mask never comes
    here too short: transformers itself fills it up.)"""
    cache = kvplug.WindowCache(model, 8)
    model(models.tokens(1, 20), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask.*10.*22"):
        model(models.tokens(1, 2), attention_mask=torch.zeros(1, 1, 2, 10), past_key_values=cache)
