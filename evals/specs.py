"""From a spec on the command line to a cache: kvplug's own, one of transformers' as `transformers:NAME`, or a context
that `kvplug.compress` has read, as `kvzip:budget=0.25`, to which `+int4` and its like may be added.

Must never let one side ride on the other: transformers' caches run with kvplug detached from the model, as they would
in a program that never heard of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache

import kvplug
from evals.errors import InputError, first_line
from kvplug.policies.scored import check_budget
from kvplug.spec import parse

PREFIX = "transformers:"
COMPRESSED = "kvzip:budget="
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


def reads_context(spec: str) -> bool:
    """Whether `spec` stands for a cache that is made of a context, rather than one that starts empty."""
    return spec.startswith(COMPRESSED)


def compressed(spec: str, model: PreTrainedModel, context: torch.Tensor | None) -> Cache | None:
    """What `kvplug.compress` makes of `context`, ids `[1, tokens]`; nothing without one.

    Raises:
        ValueError: the spec has a typo.
    """
    share, _, rest = spec.removeprefix(COMPRESSED).partition("+")
    try:
        budget = int(share) if share.isdecimal() else float(share)
    except ValueError:
        raise ValueError(f"budget={share!r} is not valid; tokens, or a share such as 0.25 is accepted") from None
    check_budget(budget)
    how = parse(rest) if rest else parse("dense")
    if how.policy is not None or how.residual is not None or how.sinks is not None:
        raise ValueError(f"{rest!r} is not valid behind it; a codec such as int4 is accepted")
    codec = how.codec
    return None if context is None else kvplug.compress(model, context, budget, codec=codec)


def build(spec: str, model: PreTrainedModel, *, capacity: int, context: torch.Tensor | None = None) -> Cache:
    """A fresh cache for `model`, empty but where the spec says that it is made of a context.

    Args:
        spec: `transformers:NAME`, `kvzip:budget=SHARE`, or anything that `kvplug.from_spec` takes.
        capacity: the tokens that it will hold at most; only caches of a fixed size look at it.
        context: ids `[1, tokens]` that will be fed first; a cache that is made of a context has seen them.

    Raises:
        InputError: the spec has a typo, doesn't fit the model, or needs a package that is missing.
    """
    try:
        if reads_context(spec):
            return compressed(spec, model, context)
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


def check(specs: list[str], model: PreTrainedModel, *, contexts: bool = False) -> list[str]:
    """`specs` without repetitions, each of which can be built, so that a typo ends a run before it starts.

    Args:
        contexts: whether caches that are made of a context are accepted.
    """
    unique = list(dict.fromkeys(specs))
    for spec in unique:
        if reads_context(spec) and not contexts:
            raise InputError(f"--cache: '{spec}' is made of a context; perplexity, tradeoff and retrieval accept it")
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
