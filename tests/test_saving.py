"""Files of caches: what is in one, that it comes back bit for bit, and how it gets to the disk.

What is refused is in `test_refused_files.py`; that a loaded cache goes on as it should, in `contract/test_saving.py`.
"""

import ast
import contextlib
import json
import os
import stat
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kvplug
from kvplug import files, saving, states
from kvplug.codecs import CODECS, SCHEMES, VALUES
from kvplug.compress import WatchedLayer
from kvplug.layer import KVLayer
from kvplug.policies import POLICIES, Votes, Window
from kvplug.residual import ResidualLayer
from kvplug.stores import ContiguousStore, PagedStore
from tests import models
from tests.caches import KINDS, named
from tests.oracles import feed
from tests.saved import metadata, small_cache

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


@pytest.fixture
def cache(model):
    return small_cache(model)


@pytest.fixture
def path(cache, tmp_path):
    cache.save(tmp_path / "cache.safetensors")
    return tmp_path / "cache.safetensors"


# What is in a file


def test_a_file_is_safetensors_that_say_what_they_are(path):
    about = metadata(path)
    assert about["format"] == "kvplug cache"
    assert about["version"] == "1"
    header = json.loads(about["header"])
    assert header["cache"] == "QuantCache"
    assert header["seen"] == 20
    assert [entry["kind"] for entry in header["layers"]] == ["ResidualLayer"] * 2
    keys = header["layers"][0]["keys"]
    assert keys["name"] == "Rotated"
    assert keys["fields"] == {"bits": 4, "group_size": 8, "codebook": "uniform", "unbiased": True}
    config = header["model"]["config"]
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] == 2
    assert config["num_key_value_heads"] == 2
    assert config["head_dim"] == 16
    assert config["vocab_size"] == models.VOCAB
    assert config["rope_parameters"]["rope_theta"] == 10000
    assert header["model"]["dtype"] == "float32"


@pytest.mark.parametrize("kind", **named(KINDS))
def test_only_what_is_in_use_is_written(model, kind, tmp_path):
    """Neither spare capacity nor the storage that a view shares: the tensors are what the report counts as used, but
    for what can be told again from the rest, and for tokens of the tail that a crop may want back."""
    cache = kind.make(model)
    feed(model, cache, models.tokens(3, 20), [17, 3])
    cache.save(tmp_path / "x")
    tensors = safetensors.torch.load_file(tmp_path / "x")
    written = sum(x.nbytes for x in tensors.values())
    kept = sum(
        x.nbytes * (layer.store.settled - layer.store.first) // max(layer.store.dense[0].shape[2], 1)
        for layer in cache.layers
        if isinstance(layer, ResidualLayer)
        for x in layer.store.dense
    )
    # Pages are written whole, each once, and the numbers of those of each row.
    pages = sum(
        3
        * (layer.store.pages.columns * layer.store.pages.page_size - layer.store.length)
        * layer.store.pages.arena.token_bytes(layer.store.index)
        + layer.store.pages.pages.nbytes
        for layer in cache.layers
        if isinstance(layer.store, PagedStore)
    )
    assert written == cache.memory().used + kept + pages
    assert os.path.getsize(tmp_path / "x") < written + 12000  # the header


def test_saving_changes_nothing_and_can_be_repeated(model, cache, path, tmp_path):
    before = cache.memory()
    cache.save(tmp_path / "again")
    assert cache.memory() == before
    kvplug.load(path, models.tiny_llama()).save(tmp_path / "twin")
    # The digest is one of all that is in a file.
    assert metadata(tmp_path / "again") == metadata(tmp_path / "twin") == metadata(path)


def test_a_loaded_cache_holds_nothing_of_the_file(path, tmp_path):
    twin = kvplug.load(path, models.tiny_llama())
    before = [x.clone() for layer in twin for x in layer[:2]]
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(b"\xff" * size)
    assert all(torch.equal(x, y) for x, y in zip(before, (x for layer in twin for x in layer[:2]), strict=True))


SCHEMES_OF_BITS = [(make, bits) for pair in SCHEMES.values() for make in pair for bits in (2, 3, 4)]


@pytest.mark.parametrize(
    "codec",
    [*CODECS.values(), *VALUES.values(), *(make(bits) for make, bits in SCHEMES_OF_BITS)],
    ids=lambda codec: codec.name,
)
def test_codecs_come_back_from_json(codec):
    told = json.loads(json.dumps(states.described(codec)))
    assert states.made(states.CODEC_KINDS, told) == codec


@pytest.mark.parametrize("name", POLICIES)
def test_policies_come_back_from_json(name):
    counts = {"streaming": (4, 8), "window": (8,)}
    shares = [(0.1, 2, 3, "uniform", [1.0, 0.3]), (7, None, 0, "uniform", "pyramid"), (1 / 3,)]
    for arguments in [counts[name]] if name in counts else shares:
        policy = POLICIES[name](*arguments)
        assert states.made(POLICIES, json.loads(json.dumps(states.described(policy)))) == policy


@pytest.mark.parametrize("kind", **named(KINDS))
def test_states_are_tensors_and_plain_json(model, kind):
    cache = kind.make(model)
    feed(model, cache, *(models.left_padded([9, 14])[1], [14], models.left_padded([9, 14])[2]))
    for layer in cache.layers:
        tensors, plain = layer.state()
        assert all(isinstance(x, torch.Tensor) for x in tensors.values())
        assert json.loads(json.dumps(plain)) == {**plain, "shape": list(plain["shape"])}
        held = {x.untyped_storage().data_ptr() for x in layer.store.tensors()}
        copies = [x for name, x in tensors.items() if name.startswith("store.") and x.numel()]
        if isinstance(layer.store, PagedStore):
            copies = []  # pages lie apart, so they are copied together
        assert all(x.untyped_storage().data_ptr() in held for x in copies), "a state is made of views"


def test_every_layer_class_that_has_a_state_is_known():
    def below(kind):
        return {kind}.union(*map(below, kind.__subclasses__()))

    found = {kind.__name__ for kind in below(KVLayer) if kind.__module__.startswith("kvplug.")} - {"WatchedLayer"}
    assert found == set(states.LAYER_KINDS)
    assert {*saving.EVICTING, "KVLayer", "ResidualLayer", "JointLayer", "CompressedLayer"} == found


@pytest.mark.parametrize("name", ["files", "states", "saving", "fingerprint"])
def test_nothing_in_a_file_is_run(name):
    """No unpickling, evaluating or importing by name anywhere in the modules that read one."""
    tree = ast.parse((Path(kvplug.__file__).parent / f"{name}.py").read_text())
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    imported = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for part in [*(alias.name for alias in node.names), getattr(node, "module", None) or ""]
    }
    forbidden = {"pickle", "eval", "exec", "importlib", "import_module", "__import__", "marshal", "dill", "torch.load"}
    assert not forbidden & (names | imported)
    assert not ("torch" in names and "load" in names)


# Bit for bit


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_tensors_come_back_bit_for_bit(tmp_path_factory, data):
    tensors = {}
    for i in range(data.draw(st.integers(0, 4))):
        dtype = data.draw(st.sampled_from(DTYPES))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=4))
        count = torch.Size(shape).numel()
        top = 1 if dtype == torch.bool else 255
        values = data.draw(
            st.lists(st.integers(0, top), min_size=count * dtype.itemsize, max_size=count * dtype.itemsize)
        )
        x = torch.tensor(values, dtype=torch.uint8).view(dtype).reshape(shape)
        if data.draw(st.booleans()) and x.ndim > 1:
            x = x.transpose(0, 1)
        tensors[f"a{i}"] = x
        if data.draw(st.booleans()):
            tensors[f"b{i}"] = x.narrow(0, 0, x.shape[0] - 1) if x.ndim and x.shape[0] else x
    path = tmp_path_factory.mktemp("bits") / "x"
    header = {"number": data.draw(st.floats(allow_nan=False)), "text": data.draw(st.text())}
    files.write(path, tensors, header)
    again, found = files.read(path)
    assert again == header
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape
        ours, theirs = (y.contiguous().reshape(-1).view(torch.uint8) for y in (x, found[name]))
        assert torch.equal(ours, theirs), "NaNs and negative zeros have their bits"


@pytest.mark.parametrize("codec", [CODECS["dense"], CODECS["int4"].tokenwise()], ids=["dense", "int4"])
def test_keys_that_few_bits_can_t_hold(model, codec, tmp_path):
    """A layer that found outliers keeps its keys as they are, after a file too, and says so once."""
    cache = kvplug.KVCache(model, codec=codec, **({"residual": 0, "sinks": 0} if codec.bits == 4 else {}))
    loud = torch.ones(16)
    loud[3] = 500
    with pytest.warns(UserWarning, match="channels more than") if codec.bits == 4 else contextlib.nullcontext():
        for layer in range(2):
            cache.update(torch.randn(1, 2, 12, 16) * loud, torch.randn(1, 2, 12, 16), layer)
            cache.layers[layer].settle()
        cache.update(torch.randn(1, 2, 1, 16) * loud, torch.randn(1, 2, 1, 16), 0)
    cache.save(tmp_path / "x")
    twin = kvplug.load(tmp_path / "x", models.tiny_llama())
    plain = codec.bits == 4
    assert [layer.store.kept_plain for layer in twin.layers] == [plain] * 2
    for one, other in zip(cache, twin, strict=True):
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (cache, twin):
            one.update(torch.ones(1, 2, 1, 16) * loud, torch.ones(1, 2, 1, 16), 1)
    assert twin.memory() == cache.memory()
    twin.reset()
    assert not twin.layers[0].store.kept_plain


# On the way to the disk


def leftovers(folder, name="cache.safetensors"):
    return [found for found in os.listdir(folder) if found != name]


@pytest.mark.parametrize("step", ["replace", "fsync", "save_file"])
def test_a_save_that_fails_leaves_the_older_file(cache, path, monkeypatch, step):
    before = path.read_bytes()

    def fail(*args, **kwargs):
        if step == "save_file":
            Path(args[1]).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(files if step == "save_file" else os, step, fail)
    cache.crop(-2)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert leftovers(path.parent) == []
    cache.save(path)
    assert kvplug.load(path, models.tiny_llama()).get_seq_length() == 18


def test_an_interrupt_leaves_no_temporary_file(cache, path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        cache.save(path)
    assert leftovers(path.parent) == []


def test_the_file_is_on_the_disk_before_it_takes_the_other_s_place(cache, path, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(stat.S_ISDIR(os.fstat(fd).st_mode)), sync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append(os.path.dirname(a)), replace(a, b)))
    cache.save(path)
    assert done == [False, str(path.parent), True], "the file, then its name, then the folder"


def test_copies_to_the_host_are_over_before_they_are_read(cache, path, monkeypatch):
    """An offload begins them and goes on; none is waited for where all lies on the host."""
    done, write = [], files.write
    monkeypatch.setattr(torch.accelerator, "synchronize", done.append)
    monkeypatch.setattr(files, "write", lambda *args: (done.append("write"), write(*args)))
    cache.save(path)
    assert done == ["write"]
    for layer in cache.layers:
        layer.device = torch.device("cuda:1")
    cache.save(path)
    assert done[1:] == [torch.device("cuda:1"), "write"]


def test_where_a_cache_can_t_be_written(cache, tmp_path):
    with pytest.raises(ValueError, match="is a folder; the name of a file is accepted"):
        cache.save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere.*doesn't exist"):
        cache.save(tmp_path / "nowhere" / "x")
    assert os.listdir(tmp_path) == []


def test_paths_may_be_strings_relative_or_links(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache.save("plain")
    assert kvplug.load("plain", models.tiny_llama()).get_seq_length() == 20
    os.symlink("plain", "link")
    cache.crop(-1)
    cache.save("link")
    assert os.path.islink("link")
    assert kvplug.load("plain", models.tiny_llama()).get_seq_length() == 19
    assert sorted(os.listdir()) == ["link", "plain"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(os.stat("plain").st_mode) == 0o666 & ~mask


@dataclass(frozen=True)
class Own(Window):
    pass


class Aside(ContiguousStore):
    pass


def test_what_can_t_be_saved_says_so(model, tmp_path):
    for cache, match in (
        (kvplug.KVCache(model, policy=Own(8)), r"Own\(window=8\) can't be saved; one of window, streaming"),
        (kvplug.KVCache.from_layers([KVLayer()]), "not made for a model"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.save(tmp_path / "x")
    layer, cache = KVLayer(), kvplug.KVCache(model)
    layer.store = Aside(*layer.store.codecs)
    for other, match in ((WatchedLayer(), "kind WatchedLayer can't be saved"), (layer, "Aside can't be saved")):
        cache.layers[0] = other
        with pytest.raises(ValueError, match=match):
            cache.save(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_class_of_a_user_comes_back_as_the_one_cache(model, tmp_path):
    class Mine(kvplug.SnapKVCache):
        pass

    cache = Mine(model, 8, observe=4, kernel=3)
    cache.save(tmp_path / "x")
    twin = kvplug.load(tmp_path / "x", models.tiny_llama())
    assert type(twin) is kvplug.KVCache
    assert twin.layers[0].policy == Votes(8, observe=4, kernel=3)
