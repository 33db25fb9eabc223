"""Caches from strings: "streaming:sinks=4,window=508+int4". A typo lists what would be accepted.

Reads and builds, and must never know how a codec or a policy works: names and arguments come from their own tables.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields

from kvplug.build import make_codecs
from kvplug.cache import KVCache
from kvplug.codecs import CODECS, Codec, get_codec
from kvplug.joining import Joining, Merging, Projecting
from kvplug.low_rank_plan import LowRankPlan
from kvplug.policies import POLICIES, Policy
from kvplug.sharing import Groups
from kvplug.sharing_plan import SharingPlan
from kvplug.stores.pages import PAGE_SIZE, Pages

NAMES = (*CODECS, "quant", *POLICIES, "paged", "shared", "minicache", "lowrank")


@dataclass(frozen=True)
class Composition:
    """What a spec says: codecs of keys and values, a policy, what stays in the model's dtype, pages, which layers share
    and which are stored together (see `KVCache`)."""

    codec: tuple[Codec, Codec]
    policy: Policy | None
    residual: int | None = None
    sinks: int | None = None
    pool: Pages | None = None
    share: Groups | SharingPlan | None = None
    joining: Joining | None = None


def parse(spec: str) -> Composition:
    """Reads a spec: parts joined by `+`, each `name` or `name:argument=value,argument=value`.

    Raises:
        ValueError: a name or argument is not known, or two parts choose the same thing; lists what is accepted.
    """
    if not isinstance(spec, str) or not spec.strip():
        raise ValueError(f"spec={spec!r} is not valid; parts joined by '+' are accepted, of {', '.join(NAMES)}")
    chosen: dict[str, tuple[str, object]] = {}
    for part in spec.split("+"):
        name, _, rest = part.strip().partition(":")
        arguments = _arguments(spec, name, rest)
        if name in POLICIES:
            kind, value = "policy", _policy(name, arguments)
        elif name == "quant" or name in CODECS:
            kind, value = "codec", _codecs(name, arguments)
        elif name == "paged":
            kind, value = "store", _pages(arguments)
        elif name == "shared":
            kind, value = "sharing", _sharing(arguments)
        elif name == "minicache":
            kind, value = "joining", Merging(**_numbers(name, arguments, Merging, ()))
        elif name == "lowrank":
            kind, value = "joining", _projecting(arguments)
        else:
            raise ValueError(f"spec={spec!r}: {name!r} is not a known part; use one of {', '.join(NAMES)}")
        if kind in chosen:
            raise ValueError(f"spec={spec!r}: {chosen[kind][0]!r} and {name!r} both choose the {kind}; one is accepted")
        chosen[kind] = (name, value)
    dense = (get_codec(None), get_codec(None))
    codec, counts = chosen.get("codec", ("", (dense, {})))[1]
    policy, pool, share, joining = (
        chosen.get(kind, ("", None))[1] for kind in ("policy", "store", "sharing", "joining")
    )
    return Composition(codec, policy, **counts, pool=pool, share=share, joining=joining)


def _projecting(arguments: dict[str, str]) -> Projecting:
    numbers = _numbers("lowrank", arguments, Projecting, ("plan",))
    if "plan" not in arguments:
        raise ValueError(
            "'lowrank' needs plan, a file of kvplug.calibrate_low_rank; lowrank:plan=FILE,rank=0.5 is accepted"
        )
    return Projecting(LowRankPlan.load(arguments["plan"]), **{"rank": 0.5, **numbers})


def _numbers(name: str, arguments: dict[str, str], kind: type, others: tuple[str, ...]) -> dict[str, float]:
    """The arguments of a part that are numbers, by the annotations of `kind`; `others` are accepted beside them."""
    known = {f.name: f.type for f in fields(kind) if "int" in f.type or "float" in f.type}
    _refuse_others(name, arguments, (*others, *known))
    return {key: _number(name, key, text, known[key]) for key, text in arguments.items() if key in known}


def _number(name: str, key: str, text: str, kind: str) -> float:
    try:
        return float(text) if "float" in kind else int(text)
    except ValueError:
        accepted = "a number" if "float" in kind else "a whole number"
        raise ValueError(f"{key}={text!r} of {name!r} is not valid; {accepted} is accepted") from None


def _sharing(arguments: dict[str, str]) -> Groups | SharingPlan:
    _refuse_others("shared", arguments, ("groups", "plan"))
    if len(arguments) != 1:
        raise ValueError(
            f"'shared' has {', '.join(arguments) or 'no arguments'}; one of groups and plan is accepted, as in "
            "shared:groups=cla2, shared:groups=0-1/2-3 or shared:plan=FILE"
        )
    if "plan" in arguments:
        return SharingPlan.load(arguments["plan"])
    text = arguments["groups"]
    if not text[0].isdecimal():
        return text
    try:
        return [[int(layer) for layer in group.split("-")] for group in text.split("/")]
    except ValueError:
        raise ValueError(
            f"groups={text!r} of 'shared' is not valid; a name such as cla2, or layers such as 0-1/2-3, are accepted"
        ) from None


def _pages(arguments: dict[str, str]) -> Pages:
    _refuse_others("paged", arguments, ("page_size",))
    return Pages(_whole("paged", "page_size", arguments.get("page_size", str(PAGE_SIZE))))


def _arguments(spec: str, name: str, rest: str) -> dict[str, str]:
    arguments: dict[str, str] = {}
    for item in filter(None, rest.split(",")):
        key, equals, value = (x.strip() for x in item.partition("="))
        if not equals or not key or not value or key in arguments:
            raise ValueError(f"spec={spec!r}: {item!r} of {name!r} is not valid; argument=value is accepted, once each")
        arguments[key] = value
    return arguments


# What a codec's part may say of integers and of the tokens that stay as they are.
WRITING, COUNTS = ("scheme", "group_size"), ("residual", "sinks")


def _codecs(name: str, arguments: dict[str, str]) -> tuple[tuple[Codec, Codec], dict[str, int]]:
    """The codecs of both sides, and the counts of tokens that are given."""
    sides = ("dtype", "keys", "values") if name == "quant" else ()
    _refuse_others(name, arguments, (*sides, *WRITING, *COUNTS) if name != "dense" else ())
    counts = {key: _whole(name, key, arguments.pop(key)) for key in COUNTS if key in arguments}
    chosen: dict[str, object] = {"dtype": "int4" if name == "quant" else name} | arguments
    if "group_size" in arguments:
        chosen["group_size"] = _whole(name, "group_size", arguments["group_size"])
    return make_codecs(**chosen), counts


# What a part of a spec may leave out, as the recipe of that name does.
DEFAULTS = {"streaming": {"sinks": 4, "window": 1020}}


def _policy(name: str, arguments: dict[str, str]) -> Policy:
    known = {f.name: f for f in fields(POLICIES[name])}
    _refuse_others(name, arguments, tuple(known))
    values: dict[str, object] = dict(DEFAULTS.get(name, {}))
    for key, text in arguments.items():
        values[key] = _value(name, key, text, known[key].type)
    missing = [key for key, f in known.items() if key not in values and f.default is MISSING]
    if missing:
        raise ValueError(f"{name!r} needs {', '.join(missing)}; {name}:{missing[0]}=512 is accepted")
    return POLICIES[name](**values)


def _value(name: str, key: str, text: str, kind: str) -> object:
    """An argument of a policy, of what its annotation says: a number of tokens, a share of them, or a word."""
    if "str" in kind:
        return text
    if "float" in kind and not text.isdecimal():
        try:
            return float(text)
        except ValueError:
            raise ValueError(
                f"{key}={text!r} of {name!r} is not valid; a whole number of tokens, or a share of the prompt such as "
                "0.25 is accepted"
            ) from None
    return _whole(name, key, text)


def _whole(name: str, key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{key}={text!r} of {name!r} is not valid; a whole number of tokens is accepted") from None


def _refuse_others(name: str, arguments: dict[str, str], accepted: tuple[str, ...]) -> None:
    for key in arguments:
        if key not in accepted:
            raise ValueError(f"{key!r} is not an argument of {name!r}; accepted: {', '.join(accepted) or 'none'}")


def from_spec(spec: str, config: object) -> KVCache:
    """A cache from a string such as `"int4"` or `"window:window=512+fp8"`.

    Args:
        spec: parts joined by `+`, in any order: a codec (`dense`, `fp8`, `int8`, `int4`, or `quant` with `keys=` and
            `values=`; with `residual=`, `sinks=`, `group_size=` and `scheme=` as in `QuantCache`) and a policy
            (`window`, `streaming`, `h2o`, `snapkv`, `tova`, `keydiff`, `knorm`, `expected_attention`; with the
            arguments of the cache of that name), `paged`, with `page_size=`, and `shared`, with `groups=` (`cla2`,
            `yoco`, or layers such as `0-1/2-3`) or `plan=`, the file of a plan; or `minicache` or `lowrank`, with the
            arguments of the cache of that name.
        config: the model or its config.

    Raises:
        ValueError: the spec has a typo (lists the valid names), or the model can't be used with it.
    """
    composition = parse(spec)
    return KVCache(config, **vars(composition))


def one_of_each(budget: int = 1024) -> list[str]:
    """A spec for every codec, for pages and for every policy, which gets `budget` where it must be told."""
    specs = [*CODECS, "paged"]
    for name, policy in POLICIES.items():
        arguments = {f.name: budget for f in fields(policy) if f.default is MISSING} | DEFAULTS.get(name, {})
        specs.append(name + ":" + ",".join(f"{key}={value}" for key, value in arguments.items()))
    return specs
