"""From a spec on the command line to a cache: kvplug's own, or one of transformers' as `transformers:NAME`.

Must never let one side ride on the other: transformers' caches run with kvplug detached from the model, as they would
in a program that never heard of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

import kvplug
from evals.errors import InputError, first_line

PREFIX = "transformers:"
REFERENCE = "transformers:dynamic"

# Each takes the model's config and the number of tokens that the cache must have room for.
BASELINES: dict[str, Callable[..., Cache]] = {
    "dynamic": lambda config, capacity: DynamicCache(config=config),
    "static": lambda config, capacity: StaticCache(config=config, max_cache_len=capacity),
    "fp8": lambda config, capacity: QuantizedCache("fp8", config),
    # With axis 1, which transformers' documentation asks for with this backend: its default costs many times the KL.
    "hqq4": lambda config, capacity: QuantizedCache("hqq", config, nbits=4, axis_key=1, axis_value=1),
    "hqq2": lambda config, capacity: QuantizedCache("hqq", config, nbits=2, axis_key=1, axis_value=1),
    "quanto4": lambda config, capacity: QuantizedCache("quanto", config, nbits=4),
    "quanto2": lambda config, capacity: QuantizedCache("quanto", config, nbits=2),
}


def is_baseline(spec: str) -> bool:
    """Whether `spec` names one of transformers' own caches."""
    return spec.startswith(PREFIX)


def build(spec: str, model: PreTrainedModel, *, capacity: int) -> Cache:
    """A fresh, empty cache for `model`.

    Args:
        spec: `transformers:NAME`, or anything that `kvplug.from_spec` takes.
        capacity: the tokens that it will hold at most; only caches of a fixed size look at it.

    Raises:
        InputError: the spec has a typo, doesn't fit the model, or needs a package that is missing.
    """
    try:
        if not is_baseline(spec):
            return kvplug.from_spec(spec, model)
        name = spec.removeprefix(PREFIX)
        if name not in BASELINES:
            raise InputError(f"--cache: '{spec}' is unknown; transformers' own are {', '.join(BASELINES)}")
        return BASELINES[name](model.config, capacity)
    except ValueError as error:
        raise InputError(f"--cache: '{spec}': {first_line(error)}") from error
    except ImportError as error:
        raise InputError(f"--cache: '{spec}' needs a package that is missing: {first_line(error)}") from error


def check(specs: list[str], model: PreTrainedModel) -> list[str]:
    """`specs` without repetitions, each of which can be built, so that a typo ends a run before it starts."""
    unique = list(dict.fromkeys(specs))
    for spec in unique:
        with routed(spec, model):
            build(spec, model, capacity=1)
    return unique


@contextmanager
def routed(spec: str, model: PreTrainedModel) -> Iterator[None]:
    """Runs its body with the model's attention as `spec` needs it: kvplug's for its own caches, else the model's."""
    if is_baseline(spec):
        yield
        return
    kvplug.attach(model)
    try:
        yield
    finally:
        kvplug.detach(model)
