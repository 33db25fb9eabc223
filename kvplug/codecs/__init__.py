"""The codecs by name. Adding one is a file and a line here."""

from __future__ import annotations

from kvplug.codecs.base import Codec, Encoded, Field, Linear
from kvplug.codecs.cast import Float8, Plain
from kvplug.codecs.integer import Int4, Int8

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Plain(), Float8(), Int8(), Int4())}

__all__ = ["CODECS", "Codec", "Encoded", "Field", "Float8", "Int4", "Int8", "Linear", "Plain", "get_codec"]


def get_codec(codec: str | Codec | None, argument: str = "codec") -> Codec:
    """A codec by its name; None is full precision, a Codec is returned as it is.

    Raises ValueError that names `argument` when there is no such codec.
    """
    if codec is None:
        return CODECS["dense"]
    if isinstance(codec, Codec):
        return codec
    if codec not in CODECS:
        raise ValueError(f"{argument}={codec!r} is not a known dtype; use one of {', '.join(CODECS)}")
    return CODECS[codec]
