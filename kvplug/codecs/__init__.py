"""The codecs by name. Adding one is a file and a line here."""

from __future__ import annotations

from collections.abc import Callable

from kvplug.codecs.base import Codec, Encoded, Field, Linear
from kvplug.codecs.cast import Float8, Plain
from kvplug.codecs.channel import PerChannel
from kvplug.codecs.grouped import GroupWise
from kvplug.codecs.integer import PerToken
from kvplug.codecs.rotated import Rotated

CODECS: dict[str, Codec] = {
    codec.name: codec for codec in (Plain(), Float8(), Float8("e5m2"), PerToken(8), Rotated(4), Rotated(3), Rotated(2))
}
# Widths of integers by name, and the ways to write them, each with its own default group.
BITS = {"int8": 8, "int4": 4, "int3": 3, "int2": 2}
SCHEMES: dict[str, Callable[..., Codec]] = {
    "rotated": Rotated,
    "channel": PerChannel,
    "token": PerToken,
    "group": GroupWise,
}

__all__ = [
    "CODECS",
    "SCHEMES",
    "Codec",
    "Encoded",
    "Field",
    "Float8",
    "GroupWise",
    "Linear",
    "PerChannel",
    "PerToken",
    "Plain",
    "Rotated",
    "get_codec",
]


def get_codec(
    codec: str | Codec | None, argument: str = "codec", *, scheme: str | None = None, group_size: int | None = None
) -> Codec:
    """A codec by its name; None is full precision, a Codec is returned as it is.

    Args:
        codec: a name of `CODECS`, or a Codec.
        argument: what the caller calls `codec`, for the error message.
        scheme: for integers, "rotated" (the default below 8 bits), "channel" (a scale for each channel and group of
            tokens), "token" (one for each token, the default of int8) or "group" (one for each group of channels).
        group_size: tokens of a group, or channels for "group"; None for the scheme's own, 64 or 32.

    Raises ValueError that names the argument, what it was and what is accepted.
    """
    if scheme is None and group_size is None:
        if codec is None:
            return CODECS["dense"]
        if isinstance(codec, Codec):
            return codec
    if isinstance(codec, str) and codec not in CODECS:
        raise ValueError(f"{argument}={codec!r} is not a known dtype; use one of {', '.join(CODECS)}")
    if scheme is None and group_size is None:
        return CODECS[codec]
    if codec not in BITS:
        given = f"scheme={scheme!r}" if scheme is not None else f"group_size={group_size!r}"
        raise ValueError(f"{given} is for integers, and {argument}={codec!r} is none; use one of {', '.join(BITS)}")
    if scheme is None:
        scheme = "token" if codec == "int8" else "rotated"
    if scheme not in SCHEMES:
        raise ValueError(f"scheme={scheme!r} is not known; use one of {', '.join(SCHEMES)}")
    if group_size is None:
        return SCHEMES[scheme](BITS[codec])
    if scheme == "token":
        raise ValueError(f"group_size={group_size!r} is not for scheme='token', which has no groups; leave it out")
    return SCHEMES[scheme](BITS[codec], group_size)
