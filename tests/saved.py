"""A small cache to be saved, and what a file of one says of itself."""

from safetensors import safe_open

import kvplug
from kvplug import files
from tests import models
from tests.oracles import feed


def small_cache(model):
    """A bit of everything: groups, a residual, rows of different lengths; 20 tokens."""
    made = kvplug.QuantCache(model, "int4", group_size=8, residual=3, sinks=1)
    _, ids, mask = models.left_padded([20, 13])
    feed(model, made, ids, [18, 2], mask)
    return made


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def rewrite(path, change):
    """Writes a file anew with another header and a digest that fits it."""
    header, tensors = files.read(path)
    tensors = {name: x.clone() for name, x in tensors.items()}
    change(header, tensors)
    files.write(path, tensors, header)
