"""Codes of a few bits in bytes, along head_dim, without wasted bits.

Must never shuffle neighbours: each part of a byte holds a run of channels, so unpacking is masks and shifts alone.
"""

from __future__ import annotations

import functools
import math

import torch

from kvplug.codecs.base import Field

# Bits of each plane: a byte holds 8 / bits codes of one plane, and the planes' bits follow each other in a code.
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
NAMES = ("codes", "high")
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def code_fields(dim: int, bits: int) -> tuple[Field, ...]:
    """The fields of codes of `bits` bits for vectors of width `dim`: "codes", and "high" for the third bit of three."""
    return tuple(
        Field(name, -(-dim * plane // 8), torch.uint8) for name, plane in zip(NAMES, PLANES[bits], strict=False)
    )


def pack(codes: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Codes uint8 `[..., dim]`, each below 2**bits → the bytes of `code_fields`, by name.

    4 bits, in halves (h = ceil(dim / 2)):

        codes, byte i:   bits 0–3 = channel i    bits 4–7 = channel i + h

    2 bits, in quarters (q = ceil(dim / 4)):

        codes, byte i:   bits 0–1 = channel i    2–3 = channel i + q    4–5 = channel i + 2q    6–7 = channel i + 3q

    3 bits, the lower two in quarters as above and the highest in eighths (e = ceil(dim / 8)):

        high, byte i:    bit k = channel i + k · e

    Channels that don't exist are written as zeros.
    """
    out, shift = {}, 0
    for name, plane in zip(NAMES, PLANES[bits], strict=False):
        out[name] = _pack(codes >> shift & ((1 << plane) - 1) if len(PLANES[bits]) > 1 else codes, plane)
        shift += plane
    return out


def unpack(fields: dict[str, torch.Tensor], bits: int, dim: int) -> torch.Tensor:
    """The inverse of `pack`: uint8 codes `[..., dim]`."""
    codes, shift = None, 0
    for name, plane in zip(NAMES, PLANES[bits], strict=False):
        part = _unpack(fields[name], plane, dim)
        codes = part if codes is None else codes | part << shift
        shift += plane
    return codes


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


def _unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    parts, width = 8 // bits, packed.shape[-1]
    if parts == 1:
        return packed
    # Several bytes at once, as the widest word that divides a row: what a shift carries over from the neighbouring byte
    # is masked away.
    size = math.gcd(max(width, 1), 8)
    words = packed.view(WORDS[size])
    mask = int.from_bytes(bytes([(1 << bits) - 1] * size), "little", signed=size > 1)
    if width == size:
        codes = words >> shifts(bits, words.dtype, words.device)
    else:
        codes = torch.cat([words >> part * bits for part in range(parts)], dim=-1)
    return codes.bitwise_and_(mask).view(torch.uint8)[..., :dim]


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)
def shifts(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """How far each part of a byte lies from its lowest bit, `[8 / bits]`."""
    return torch.arange(0, 8, bits, dtype=dtype, device=device)
