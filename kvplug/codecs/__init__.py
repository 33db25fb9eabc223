"""The codecs by name. Adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from kvplug.codecs.base import Codec, Encoded, Factors, Field
from kvplug.codecs.cast import Float8, Plain
from kvplug.codecs.channel import PerChannel
from kvplug.codecs.grouped import GroupWise
from kvplug.codecs.integer import PerToken
from kvplug.codecs.joint import LowRank, Merged
from kvplug.codecs.rotated import Rotated

# Widths of integers by name.
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}


def _rotated(codebook: str) -> Scheme:
    """Keys are there for their products with queries, and each of their channels has a mean; values are there to be
    added up, and their means are small."""

    def keys(bits: int, group_size: int = 64) -> Codec:
        return Rotated(bits, group_size, codebook, unbiased=True)

    def values(bits: int, group_size: int | None = None) -> Codec:
        return Rotated(bits, None, codebook)

    return keys, values


def _per_token(bits: int, group_size: int | None = None) -> Codec:
    return PerToken(bits)


# Ways to write integers: from bits, and a group size that is left out for the default, the codec of keys and of values.
Scheme = tuple[Callable[..., Codec], Callable[..., Codec]]
SCHEMES: dict[str, Scheme] = {
    "rotated": _rotated("uniform"),
    "lloyd_max": _rotated("lloyd_max"),
    "channel": (PerChannel, _per_token),
    "token": (PerToken, PerToken),
    "group": (GroupWise, GroupWise),
}
ROTATING = ("rotated", "lloyd_max")
# By name: what stores keys, and what stores values where that is not the same.
CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (Plain(), Float8(), Float8("e5m2"), PerToken(8), *(SCHEMES["rotated"][0](bits) for bits in (4, 3, 2)))
}
VALUES: dict[str, Codec] = {name: SCHEMES["rotated"][1](BITS[name]) for name in ("int4", "int3", "int2")}

__all__ = [
    "CODECS",
    "SCHEMES",
    "Codec",
    "Encoded",
    "Factors",
    "Field",
    "Float8",
    "GroupWise",
    "LowRank",
    "Merged",
    "PerChannel",
    "PerToken",
    "Plain",
    "Rotated",
    "get_codec",
]


def get_codec(
    codec: str | Codec | None,
    argument: str = "codec",
    *,
    side: str = "keys",
    scheme: str | None = None,
    group_size: int | None = None,
) -> Codec:
    """A codec by its name; None is full precision, a Codec is returned as it is.

    Args:
        codec: a name of `CODECS`, or a Codec.
        argument: what the caller calls `codec`, for the error message.
        side: "keys" or "values", which is to be stored.
        scheme: for integers, "rotated" (the default below 8 bits), "lloyd_max" (the same with levels that fit a
            Gaussian), "channel" (for keys a scale for each channel and group of tokens, for values one for each token),
            "token" (one for each token, the default of int8) or "group" (one for each group of channels).
        group_size: tokens of a group of keys, or channels for "group"; None for the scheme's own, 64 or 32.

    Raises ValueError that names the argument, what it was and what is accepted.
    """
    if scheme is None and group_size is None:
        if codec is None:
            return CODECS["dense"]
        if isinstance(codec, Codec):
            return codec
    if codec is not None and not isinstance(codec, Codec) and not (isinstance(codec, str) and codec in CODECS):
        raise ValueError(f"{argument}={codec!r} is not a known dtype; use one of {', '.join(CODECS)}")
    if scheme is None and group_size is None:
        return VALUES.get(codec, CODECS[codec]) if side == "values" else CODECS[codec]
    if codec not in BITS:
        given = f"scheme={scheme!r}" if scheme is not None else f"group_size={group_size!r}"
        raise ValueError(f"{given} is for integers, and {argument}={codec!r} is none; use one of {', '.join(BITS)}")
    if scheme is None:
        scheme = "token" if codec == "int8" else "rotated"
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not known; use one of {', '.join(SCHEMES)}")
    if codec == "int8" and scheme in ROTATING:
        raise ValueError(
            f"scheme={scheme!r} is for 4 bits and fewer, and {argument}='int8'; use one of "
            f"{', '.join(name for name in SCHEMES if name not in ROTATING)}"
        )
    make = SCHEMES[scheme][side == "values"]
    if group_size is None:
        return make(BITS[codec])
    if scheme == "token":
        raise ValueError(f"group_size={group_size!r} is not for scheme='token', which has no groups; leave it out")
    return make(BITS[codec], group_size)
