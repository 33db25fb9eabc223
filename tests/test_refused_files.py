"""Files that are damaged, foreign, of a newer version or of another model are refused with a clear error, and neither
file nor model is touched.
"""

import json
import os
import struct

import pytest
import safetensors.torch
import torch

import kvplug
from kvplug import files, fingerprint, saving
from tests import models
from tests.oracles import feed
from tests.saved import metadata, rewrite, small_cache


@pytest.fixture
def path(model, tmp_path):
    small_cache(model).save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


def refused(path, model, match):
    """Loading raises a ValueError that names the file, and touches neither it nor the model."""
    before = path.read_bytes() if path.is_file() else None
    attention = model.config._attn_implementation
    with pytest.raises(ValueError, match=match) as caught:
        kvplug.load(path, model)
    assert str(path) in str(caught.value)
    assert "accepted" in str(caught.value)
    assert model.config._attn_implementation == attention == "sdpa"
    assert before is None or path.read_bytes() == before


@pytest.fixture
def untouched():
    return models.tiny_llama()


def test_a_file_that_was_cut_short(path, untouched):
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    for size in (0, 1, 7, 8, 9, 100, header // 2, header - 1, header, header + 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, untouched, "is damaged")
    path.write_bytes(whole + b"\0")
    refused(path, untouched, "is damaged")


def test_a_bit_that_was_flipped(path, untouched):
    """In the length, anywhere in the header, and in the tensors."""
    whole = path.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    places = [*range(8), *range(8, header, 61), header - 1, *range(header, len(whole), 211), len(whole) - 1]
    about = whole.index(b'"version"')
    for place in [*places, *range(about, about + 16), *range(whole.index(b'"sha256"'), whole.index(b'"sha256"') + 20)]:
        for bit in (1, 32) if place % 2 else (4,):
            changed = bytearray(whole)
            changed[place] ^= bit
            path.write_bytes(changed)
            refused(path, untouched, "damaged|no kvplug cache|has version")
    path.write_bytes(whole)
    kvplug.load(path, untouched)


def test_what_is_no_file_of_ours(tmp_path, untouched):
    with pytest.raises(FileNotFoundError, match=r"missing.*doesn't exist"):
        kvplug.load(tmp_path / "missing", untouched)
    refused(tmp_path, untouched, "is not a file")
    foreign = tmp_path / "model.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(3)}, foreign)
    refused(foreign, untouched, "no kvplug cache")
    safetensors.torch.save_file({"weight": torch.ones(3)}, foreign, metadata={"format": "pt"})
    refused(foreign, untouched, "no kvplug cache")
    torch.save({"weight": torch.ones(3)}, foreign)
    refused(foreign, untouched, "is not a kvplug cache")
    foreign.write_bytes(os.urandom(5000))
    refused(foreign, untouched, "is not a kvplug cache")
    foreign.write_text('{"format": "kvplug cache", "version": "1"}')
    refused(foreign, untouched, "is not a kvplug cache")


def test_a_newer_version(path, untouched, monkeypatch):
    monkeypatch.setattr(files, "VERSION", 2)
    rewrite(path, lambda header, tensors: None)
    monkeypatch.undo()
    refused(path, untouched, "has version 2.*up to version 1 is accepted")


OTHERS = {
    "layers": (lambda: models.tiny_llama(num_hidden_layers=3), "num_hidden_layers is 2 there and 3 here"),
    "heads": (lambda: models.tiny_llama(num_key_value_heads=4), "num_key_value_heads is 2 there and 4 here"),
    "rope": (lambda: models.tiny_llama(rope_parameters=models.ROPES["linear"]), "rope_parameters is"),
    "vocab": (lambda: models.tiny_llama(vocab_size=98), "vocab_size is 97 there and 98 here"),
    "dtype": (lambda: models.tiny_llama().to(torch.bfloat16), "dtype is 'float32' there and 'bfloat16' here"),
    "weights": (lambda: models.tiny_llama(seed=1), "its weights are not"),
    "family": (lambda: models.tiny_phi(), "model_type is 'llama' there and 'phi' here"),
}


@pytest.mark.parametrize(("other", "match"), OTHERS.values(), ids=OTHERS)
def test_another_model(path, other, match):
    refused(path, other(), f"another model.*{match}")


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.self_attn.v_proj.weight", "model.embed_tokens.weight"]
)
def test_weights_that_were_trained_on(path, untouched, name):
    with torch.no_grad():
        untouched.get_parameter(name).mul_(1.001)
    refused(path, untouched, "its weights are not")


def test_the_devices_of_layers_are_the_model_s(untouched):
    """Weights that lie on `meta`, to be fetched for each forward, tell nothing: there it is the model's own device."""
    cpu = torch.device("cpu")
    assert saving._devices(untouched) == {0: cpu, 1: cpu, -1: cpu}
    untouched.model.layers[1].to("meta")
    assert saving._devices(untouched) == {0: cpu, 1: cpu, -1: cpu}
    assert saving._devices(untouched.config) == {}
    assert list(saving._devices(models.tiny_llama().to("meta")).values())[-1] == cpu


def test_settings_without_effect_make_no_other_model(path):
    other = models.tiny_llama(initializer_range=0.2, use_cache=False, attention_dropout=0.5, attention="eager")
    other.config.update({"bos_token_id": 5, "architectures": ["LlamaForCausalLM"], "_name_or_path": "somewhere"})
    assert kvplug.load(path, other).get_seq_length() == 20
    # The body alone makes the same keys and values.
    assert kvplug.load(path, models.tiny_llama().model).get_seq_length() == 20


def test_from_a_config_weights_are_not_compared(model, tmp_path):
    cache = kvplug.WindowCache(model.config, 8)
    feed(model, cache, models.tokens(1, 12), [12])
    cache.save(tmp_path / "x")
    assert json.loads(metadata(tmp_path / "x")["header"])["model"]["weights"] is None
    kvplug.load(tmp_path / "x", models.tiny_llama(seed=1))
    other = models.tiny_llama()
    twin = kvplug.load(tmp_path / "x", other.config)
    assert other.config._attn_implementation == "kvplug"
    more = models.tokens(1, 5, seed=2)
    assert torch.equal(feed(other, twin, more, [1, 4]), feed(model, cache, more, [1, 4]))


def test_the_digest_reads_each_weight_where_it_is(model):
    """None where weights are not at hand; otherwise the same however they are stored."""
    digest = fingerprint.fingerprint(model)["weights"]
    again = models.tiny_llama()
    for weight in again.parameters():
        if weight.ndim == 2:
            weight.data = weight.data.t().contiguous().t()
    assert fingerprint.fingerprint(again)["weights"] == digest
    assert fingerprint.fingerprint(models.tiny_llama().to("meta"))["weights"] is None


def test_a_model_that_can_t_be_routed(path, tmp_path, untouched):
    """The same errors as the constructor's."""
    with pytest.raises(ValueError, match="config=int is not accepted"):
        kvplug.load(path, 5)
    model = models.tiny_llama()
    kvplug.WindowCache(model, 8).save(tmp_path / "x")
    untouched.config._attn_implementation_internal = "flex_attention"
    with pytest.raises(ValueError, match="attn_implementation='flex_attention' can't be routed"):
        kvplug.load(tmp_path / "x", untouched)
    assert untouched.config._attn_implementation == "flex_attention"
    # A cache that keeps all tokens works without, as a new one does.
    assert kvplug.load(path, untouched).get_seq_length() == 20


CRAFTED = {
    "layer": (lambda h, t: h["layers"][0].update(kind="os.system"), "'os.system'.*is not known"),
    "codec": (lambda h, t: h["layers"][0]["keys"].update(name="subprocess.Popen"), "'subprocess.Popen' is not known"),
    "field": (lambda h, t: h["layers"][0]["keys"]["fields"].update(bits=99), "bits=99 is not accepted"),
    "no_field": (lambda h, t: h["layers"][0]["keys"]["fields"].update(more=1), "TypeError.*more"),
    "shape": (lambda h, t: t.update({"0.store.encoded.keys.codes": t["0.store.encoded.keys.codes"][:1]}), "of shape"),
    "dtype": (lambda h, t: t.update({"1.store.counts": t["1.store.counts"].int()}), "torch.int32 of shape"),
    "tensor": (lambda h, t: t.pop("1.store.counts"), "KeyError"),
    "header": (lambda h, t: h.pop("layers"), "KeyError"),
    "model": (lambda h, t: h["model"].pop("config"), "KeyError"),
    "fewer": (lambda h, t: h["layers"].pop(), "policy has 1 entries"),
    "theirs": (lambda h, t: h["layers"][0].update(theirs=True, kind="DynamicLayer"), "policy has 1 entries"),
}


@pytest.mark.parametrize(("change", "match"), CRAFTED.values(), ids=CRAFTED)
def test_a_file_with_a_digest_that_fits_and_contents_that_don_t(path, untouched, change, match):
    rewrite(path, change)
    refused(path, untouched, match)


def test_attributes_of_other_layers_are_those_they_have(tmp_path):
    model = models.tiny_gemma3()
    cache = kvplug.DenseCache(model)
    feed(model, cache, models.tokens(1, 12), [12])
    for change in (
        lambda h, t: h["layers"][0]["state"].update(update=5),
        lambda h, t: h["layers"][0]["state"].pop("cumulative_length"),
        lambda h, t: h["layers"][0]["state"].update(keys={"dict": [[0, None]]}, record_past={"dict": []}),
        lambda h, t: h["layers"][0].update(kind="DynamicLayer"),
    ):
        cache.save(tmp_path / "x")
        rewrite(tmp_path / "x", change)
        refused(tmp_path / "x", models.tiny_gemma3(), "transformers")
