"""Codes of a few bits in bytes, along head_dim, without wasted bits.

Must never shuffle neighbours: each part of a byte holds a run of channels, so unpacking is masks and shifts of whole
words.
"""

from __future__ import annotations

import functools
import math

import torch

from kvplug.codecs.base import Field, from_planes

# Widths that can be packed.
BITS = (2, 3, 4, 8)
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def code_fields(dim: int, bits: int) -> tuple[Field, ...]:
    """The fields of codes of `bits` bits for vectors of width `dim`: "codes", and "low" for the lowest bit of three."""
    if bits == 3:
        return Field("codes", -(-dim // 4), torch.uint8), Field("low", -(-dim // 8), torch.uint8)
    return (Field("codes", -(-dim * bits // 8), torch.uint8),)


def pack(codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Codes uint8 `[..., dim]`, each below 2**bits → the bytes of `code_fields`, by name.

    4 bits, in halves (h = ceil(dim / 2)):

        codes, byte i:   bits 0–3 = channel i    bits 4–7 = channel i + h

    2 bits, in quarters (q = ceil(dim / 4)):

        codes, byte i:   bits 0–1 = channel i    2–3 = channel i + q    4–5 = channel i + 2q    6–7 = channel i + 3q

    3 bits, the upper two in quarters as above and the lowest in both halves of each quarter (e = ceil(q / 2)):

        low, byte i:     bits 0, 1 = channel i, i + e of the first quarter    2, 3 = of the second    and so on

    Channels that don't exist are written as zeros.
    """
    if bits != 3:
        return {"codes": _pack(codes, bits)}
    quarter = -(-codes.shape[-1] // 4)
    low = torch.nn.functional.pad(codes & 1, (0, 4 * quarter - codes.shape[-1])).unflatten(-1, (4, quarter))
    low = torch.nn.functional.pad(low, (0, quarter % 2)).flatten(-2)
    return {"codes": _pack(codes >> 1, 2), "low": _pack(low, 1)}


def unpack(fields: dict[str, torch.Tensor], bits: int, dim: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 codes `[..., dim]`."""
    return from_planes(unpack_planes(fields, bits), dim)


def unpack_planes(fields: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """The codes uint8 `[planes, ..., width]`, channel p * width + i at place i of plane p: what a byte's parts are
    without moving channels next to each other, which costs more than all else."""
    if bits != 3:
        return _unpack(fields["codes"], bits)
    planes = _unpack(fields["codes"], 2, shift=1)
    quarter, half = planes.shape[-1], fields["low"].shape[-1]
    low = _words(fields["low"], half) if quarter == 2 * half else fields["low"]
    out, width = planes.view(low.dtype), low.shape[-1]
    for side in range(2):
        place = out[..., side * width : (side + 1) * width]
        bits_of_side = low >> _every_second(side, low.ndim, low.dtype, low.device)
        place.bitwise_or_(bits_of_side.bitwise_and_(_repeated(1, low.itemsize))[..., : place.shape[-1]])
    return planes


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def _every_second(first: int, ndim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The shifts `first`, first + 2, + 4 and + 6, along a dimension in front of `ndim` others."""
    return torch.arange(first, 8, 2, dtype=dtype, device=device).view(4, *[1] * ndim)


def _pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    parts = 8 // bits
    width = -(-codes.shape[-1] // parts)
    lacking = width * parts - codes.shape[-1]
    if lacking:
        codes = torch.nn.functional.pad(codes, (0, lacking))
    packed = codes[..., :width]
    for part in range(1, parts):
        packed = packed | codes[..., part * width : (part + 1) * width] << part * bits
    return packed


def _unpack(packed: torch.Tensor, bits: int, shift: int = 0) -> torch.Tensor:
    """Bytes `[..., width]` → their parts of `bits` bits, `[8 / bits, ..., width]`, each shifted left by `shift`."""
    if bits == 8:
        return packed[None]
    # Several bytes at once, as the widest word that divides a row: what a shift carries over from the neighbouring byte
    # is masked away.
    words = _words(packed, packed.shape[-1])
    mask = _repeated((1 << bits) - 1 << shift, words.itemsize)
    planes = words.new_empty(8 // bits, *words.shape)
    for part, plane in enumerate(planes):
        right = part * bits - shift
        moved = words if right == 0 else words >> right if right > 0 else words << -right
        torch.bitwise_and(moved, mask, out=plane)
    return planes.view(torch.uint8)


def _words(packed: torch.Tensor, width: int) -> torch.Tensor:
    """The bytes as the widest words that divide `width`."""
    return packed.view(WORDS[math.gcd(max(width, 1), 8)])


def _repeated(byte: int, size: int) -> int:
    """A word of `size` bytes that are all `byte`."""
    return int.from_bytes(bytes([byte] * size), "little", signed=size > 1)
