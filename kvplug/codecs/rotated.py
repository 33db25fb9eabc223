"""Low-bit codecs after a rotation, with one scale a token and head and, if wanted, a mean for each group of tokens.

The levels lie where a Gaussian needs them, which is what a rotation makes of almost any vector. Must never need a table
to decode: a level is a cubic in the code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from kvplug.codecs.base import Codec, Encoded, Field, Linear, rotate_blocks
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.groups import check_group_size, group_mean, spread
from kvplug.codecs.packing import code_fields, pack, unpack

# By bits: the levels are t · (cubic + t²) · unit for odd t from -(2**bits - 1) to 2**bits - 1: whole numbers, but for
# the unit, a power of two that keeps the scale near the vector's root mean square. Among such cubics these have the
# least squared error for a Gaussian: 0.1176, 0.0347 and 0.0097 of its variance. With free levels it would be 0.1175,
# 0.0345 and 0.0095 (Max, "Quantizing for minimum distortion", 1960; Lloyd, "Least squares quantization in PCM", 1982).
CUBIC = {2: 71, 3: 163, 4: 459}
UNIT = {2: 2.0**-7, 3: 2.0**-9, 4: 2.0**-12}
# Times the root mean square: the scale that fits a Gaussian, from which the search for a vector's own starts.
FIRST_SCALE = {2: 0.8053, 3: 0.7418, 4: 1.0739}
# Codes are chosen twice, the second time against the scale that suits the first codes best: the squared error falls by
# 1 to 4% for Gaussian vectors, and by up to a third for such with heavy tails.
PASSES = 2


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def levels(bits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All levels `[2**bits]` in fp32 for a scale of 1, and the `[2**bits - 1]` midpoints between them."""
    odd = 2.0 * torch.arange(1 << bits, device=device) - ((1 << bits) - 1)
    found = odd * (CUBIC[bits] + odd * odd) * UNIT[bits]
    return found, (found[1:] + found[:-1]) / 2


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def cubic(bits: int, device: torch.device) -> torch.Tensor:
    """`CUBIC` as a tensor, for operations that take no number."""
    return torch.tensor(CUBIC[bits], dtype=torch.int16, device=device)


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def signs(dim: int, device: torch.device) -> torch.Tensor:
    """The Golay–Rudin–Shapiro sequence `[dim]` in fp32: -1 where a channel's binary has an odd number of "11".

    A Hadamard rotation alone makes one spike of a constant vector, the worst there is for a Gaussian's levels. After
    these signs it becomes as flat as can be (all of one magnitude, in blocks of 4, 16, 64 …), and so does every pattern
    that repeats in powers of two.
    """
    odd = [bin(i & i >> 1).count("1") % 2 for i in range(dim)]
    return 1.0 - 2.0 * torch.tensor(odd, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class Rotated(Codec):
    """2, 3 or 4 bits a channel after a Hadamard rotation along head_dim, with one scale a token and head.

    With `group_size`, the mean of the rotated vectors over each group of that many consecutive tokens is stored in bf16
    and what differs from it is encoded: a channel's bias costs nothing. Without, tokens are independent.

        x = unrotate(scale · level(code) + offset of the token's group)

    The scale is the one with the least squared error for the codes. x must be finite: a group with an infinity or a NaN
    comes back as NaN, and nothing is raised, since looking would make a GPU wait.

    Rotation: Ashkboos et al., "QuaRot", 2024 (arXiv:2404.00456); a fixed Gaussian codebook after it: Zandieh et al.,
    "TurboQuant", 2025 (arXiv:2504.19874).

    Args:
        bits: 2, 3 or 4.
        group_size: tokens that share an offset, at least 1; None for no offset.
    """

    bits: int = 4
    group_size: int | None = 64

    def __post_init__(self):
        if self.bits not in CUBIC:
            raise ValueError(f"bits={self.bits!r} is not accepted; use one of {', '.join(map(str, CUBIC))}")
        check_group_size(self.group_size, optional=True)

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def granule(self) -> int:
        return self.group_size or 1

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        found = (*code_fields(dim, self.bits), Field("scale", 1, SCALE_DTYPE, "scales"))
        if self.group_size is None:
            return found
        return (*found, Field("offset", dim, SCALE_DTYPE, "scales", self.group_size))

    def tokenwise(self) -> Codec:
        return self if self.group_size is None else replace(self, group_size=None)

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_blocks(x * signs(x.shape[-1], x.device))

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_blocks(x) * signs(x.shape[-1], x.device)

    def encode(self, x: torch.Tensor) -> Encoded:
        y, offset = self.rotate(x), None
        if self.group_size is not None:
            offset = group_mean(y, self.group_size).to(SCALE_DTYPE)
            y = y - spread(offset.float(), self.group_size, y.shape[2])
        table, midpoints = levels(self.bits, x.device)
        scale = y.square().mean(-1, keepdim=True).sqrt() * FIRST_SCALE[self.bits]
        for _ in range(PASSES):
            codes = torch.bucketize(y / torch.where(scale > 0, scale, 1.0), midpoints, out_int32=True)
            level = table[codes]
            scale = (y * level).sum(-1, keepdim=True) / level.square().sum(-1, keepdim=True)
            scale = scale.to(SCALE_DTYPE).float()
        fields = pack(codes.to(torch.uint8), self.bits)
        fields["scale"] = scale.to(SCALE_DTYPE)
        if offset is not None:
            fields["offset"] = offset
        return Encoded(self, fields, x.shape[-1])

    def linear(self, encoded: Encoded) -> Linear:
        f = encoded.fields
        # Levels are whole numbers below 2**15, and 16-bit integers pass through memory at half the cost of fp32.
        odd = unpack(f, self.bits, encoded.dim).view(torch.int8).mul_(2).sub_((1 << self.bits) - 1).to(torch.int16)
        level = torch.addcmul(cubic(self.bits, odd.device), odd, odd).mul_(odd).float()
        scale = f["scale"].float().mul_(UNIT[self.bits]).transpose(-1, -2)
        offset = f["offset"].float() if self.group_size is not None else None
        return Linear(level, scale, offset=offset)
