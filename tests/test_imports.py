"""Imports go down only, and what a user may lack is not needed: this reads the source rather than trusting it.

cache → layer → {stores, policies} → {codecs, view} → torch; attention → {view, kernels, compat}; `layer` and
`attention` meet in `view` and never import each other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvplug

ROOT = Path(kvplug.__file__).parent
# A room imports only from rooms of a lower floor, or from itself.
FLOORS = [
    {"codecs", "compat", "files"},
    {"view", "rope", "fingerprint"},
    {"stores", "policies", "kernels", "probe", "padding"},
    {"sharing", "sharing_plan", "low_rank_plan"},
    {"layer", "attention", "prefixes", "joining"},
    {"memory", "residual", "evicting", "absorb"},
    {"scored", "joint"},
    {"adaptive", "states"},
    {"build"},
    {"cache"},
    {"pool", "prefill", "shapes", "compress", "calibrate"},
    {"recipes", "spec"},
    {"planning", "saving"},
    {"plotting"},
    {"cli"},
    {"__init__", "__main__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(ROOT.rglob("*.py"))


def room(path):
    """The first part of a file's path: its module or folder."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree):
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide which room is meant"
            if node.module == "kvplug":
                yield from (f"kvplug.{alias.name}" for alias in node.names)
            else:
                yield node.module


def rooms_imported(path):
    for name in imported(ast.parse(path.read_text())):
        if name.split(".")[0] == "kvplug":
            yield name.split(".")[1]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_imports_go_down(path):
    here = room(path)
    assert here in FLOOR, f"give the room {here} a floor in {Path(__file__).name}"
    for other in rooms_imported(path):
        assert other == here or FLOOR[other] < FLOOR[here], f"{here} imports {other}"


def test_layer_and_attention_never_import_each_other():
    assert "attention" not in reach("layer")
    assert "layer" not in reach("attention")


def reach(start):
    """Every room that is imported by `start`, directly or not."""
    seen, todo = set(), [start]
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += [other for path in FILES if room(path) == here for other in rooms_imported(path)]
    return seen - {start}


@pytest.mark.parametrize("name", ["codecs", "view", "stores", "policies"])
def test_the_lowest_rooms_know_nothing_of_transformers(name):
    for path in FILES:
        if room(path) == name:
            assert not any(module.split(".")[0] == "transformers" for module in imported(ast.parse(path.read_text())))


VERSION_NAMES = {"__version__", "version", "is_transformers_version", "is_torch_greater_or_equal"}


OTHERS = [path for path in FILES if path.name != "compat.py"]


@pytest.mark.parametrize("path", OTHERS, ids=[str(path.relative_to(ROOT)) for path in OTHERS])
def test_only_compat_asks_which_transformers_this_is(path):
    """No version numbers, no package metadata, no asking what transformers has, no import that may fail."""
    tree = ast.parse(path.read_text())
    modules = set(imported(tree))
    assert not modules & {"importlib.metadata", "packaging", "packaging.version"}
    from_transformers = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers")
        for alias in node.names
    } | {"transformers"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "transformers":
            assert node.attr not in VERSION_NAMES
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            assert not (isinstance(node.args[0], ast.Name) and node.args[0].id in from_transformers)
        if isinstance(node, ast.Try):
            caught = {
                name.id
                for h in node.handlers
                for name in ast.walk(h.type or ast.Name(""))
                if isinstance(name, ast.Name)
            }
            assert not caught & {"ImportError", "ModuleNotFoundError"}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent)


def test_importing_needs_no_triton_and_touches_no_device():
    """With triton out of reach (None in `sys.modules` makes its import fail) all that is public still imports."""
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kvplug, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert all(getattr(kvplug, name) is not None for name in kvplug.__all__)\n"
        "assert not {'evals', 'matplotlib', 'datasets', 'kvplug.cli', 'kvplug.shapes'} & set(sys.modules)\n"
    )
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_nothing_of_triton_is_imported_but_in_its_kernels():
    for path in FILES:
        if "triton" not in path.name:
            assert not any(name.split(".")[0] == "triton" for name in imported(ast.parse(path.read_text())))


def test_the_public_names():
    names = {
        "KVCache", "DenseCache", "QuantCache", "WindowCache", "StreamingLLMCache", "from_spec", "plan", "MemoryReport",
        "attach", "detach",
    }  # fmt: skip
    assert names <= set(kvplug.__all__)
    assert all(hasattr(kvplug, name) for name in names)


def test_library_code_has_no_bare_assert_and_no_long_file():
    for path in FILES:
        text = path.read_text()
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(text))), path
        assert text.count("\n") <= 450, path
