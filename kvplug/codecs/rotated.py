"""Low-bit codecs after a rotation, with one scale a token and head and, if wanted, a mean for each group of tokens.

A rotation makes of almost any vector one whose elements look like draws from a Gaussian, so one set of levels fits all.
Must never need a table to decode.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from kvplug.codecs.base import Codec, Encoded, Factors, Field, in_pieces, rotate_blocks
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.groups import check_group_size, group_mean, spread
from kvplug.codecs.packing import code_fields, pack, unpack_planes

CODEBOOKS = ("uniform", "lloyd_max")
BITS = (2, 3, 4)
# By bits: the levels of "lloyd_max" are t · (cubic + t²) · unit for odd t from -(2**bits - 1) to 2**bits - 1: whole
# numbers, but for the unit, a power of two that keeps the scale near the vector's root mean square. Among such cubics
# these have the least squared error for a Gaussian: 0.1176, 0.0347 and 0.0097 of its variance. With free levels it
# would be 0.1175, 0.0345 and 0.0095 (Max, "Quantizing for minimum distortion", 1960; Lloyd, "Least squares quantization
# in PCM", 1982).
CUBIC = {2: 71, 3: 163, 4: 459}
UNIT = {2: 2.0**-7, 3: 2.0**-9, 4: 2.0**-12}
# Times the root mean square: the scale that fits a Gaussian, half of Max's uniform steps for "uniform".
FIRST_SCALE = {"uniform": {2: 0.4979, 3: 0.2930, 4: 0.1676}, "lloyd_max": {2: 0.8053, 3: 0.7418, 4: 1.0739}}
# What it is multiplied by for the scales that are tried: a vector of 64 numbers can have its largest at two or at four
# times the root mean square.
TRIED = 8
NARROWEST, WIDEST = 0.8, 1.25


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def levels(bits: int, codebook: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """All levels `[2**bits]` in fp32 for a scale of 1, and the `[2**bits - 1]` midpoints between them."""
    found = 2.0 * torch.arange(1 << bits, dtype=torch.float32, device=device) - ((1 << bits) - 1)
    if codebook == "lloyd_max":
        found = found * (CUBIC[bits] + found * found) * UNIT[bits]
    return found, (found[1:] + found[:-1]) / 2


@functools.lru_cache(maxsize=16)
@torch.inference_mode(False)
def factors(device: torch.device) -> torch.Tensor:
    """Factors of the scales that are tried, `[TRIED, 1]`, in equal ratios."""
    return NARROWEST * (WIDEST / NARROWEST) ** (
        torch.arange(TRIED, dtype=torch.float32, device=device)[:, None] / (TRIED - 1)
    )


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

    The codes are those closest in direction to the vector among what several scales give. The scale that is stored is
    then the one with the least squared error, or with `unbiased` the one that keeps the vector's product with itself:
    least squares makes vectors shorter, and a key that is too short gets too little attention. x must be finite: a
    group with an infinity or a NaN comes back as NaN, and nothing is raised, since looking would make a GPU wait.

    Rotation: Ashkboos et al., "QuaRot", 2024 (arXiv:2404.00456); a fixed Gaussian codebook after it, and both kinds of
    scale: Zandieh et al., "TurboQuant", 2025 (arXiv:2504.19874).

    Args:
        bits: 2, 3 or 4.
        group_size: tokens that share an offset, at least 1; None for no offset.
        codebook: "uniform" (equal steps, the fastest to read) or "lloyd_max" (levels that fit a Gaussian, a smaller
            error).
        unbiased: whether the scale keeps products rather than the least squared error.
    """

    bits: int = 4
    group_size: int | None = 64
    codebook: str = "uniform"
    unbiased: bool = False

    def __post_init__(self):
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r} is not accepted; use one of {', '.join(map(str, BITS))}")
        check_group_size(self.group_size, optional=True)
        if self.codebook not in CODEBOOKS:
            raise ValueError(f"codebook={self.codebook!r} is not accepted; use one of {', '.join(CODEBOOKS)}")

    @property
    def name(self) -> str:
        return f"int{self.bits}" if self.codebook == "uniform" else f"int{self.bits}_{self.codebook}"

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
        codes, scale = in_pieces(self._choose, y)
        fields = pack(codes, self.bits)
        fields["scale"] = scale
        if offset is not None:
            fields["offset"] = offset
        return Encoded(self, fields, x.shape[-1])

    def _choose(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes uint8 and scales for fp32 vectors `[..., dim]` that are rotated and without their offset."""
        # Of the largest element, so that no square is beyond fp32.
        peak = y.abs().amax(-1, keepdim=True)
        y = y / torch.where(peak > 0, peak, 1.0)
        first = y.square().mean(-1, keepdim=True).sqrt() * FIRST_SCALE[self.codebook][self.bits]
        _, product, square = self._nearest(y[..., None, :], first[..., None] * factors(y.device))
        best = (product * product / square).argmax(-2, keepdim=True)
        product, square = (x.take_along_dim(best, dim=-2).squeeze(-2) for x in (product, square))
        # Once more against the scale that suits these codes best, which is none of those that were tried.
        codes, product, square = self._nearest(y, product / square)
        scale = product / square
        if self.unbiased:
            # Where all is zero so is the product, and the scale is zero as well.
            scale = torch.where(product > 0, y.square().sum(-1, keepdim=True) / product, scale)
        return codes, (scale * peak).to(SCALE_DTYPE)

    def _nearest(self, y: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The codes of the levels nearest to y / scale, and the levels' products with y and with themselves."""
        y_scaled = y / torch.where(scale > 0, scale, 1.0)
        table, midpoints = levels(self.bits, self.codebook, y.device)
        if self.codebook == "uniform":
            last = (1 << self.bits) - 1
            codes = y_scaled.add_(last).mul_(0.5).round_().clamp_(0, last)
            level = 2 * codes - last
        else:
            codes = torch.bucketize(y_scaled, midpoints, out_int32=True)
            level = table[codes]
        product, square = (level * y).sum(-1, keepdim=True), level.square().sum(-1, keepdim=True)
        return codes.to(torch.uint8), product, square

    def codes(self, encoded: Encoded) -> torch.Tensor:
        codes = unpack_planes(encoded.fields, self.bits)
        if self.codebook == "uniform":
            return codes.float()
        # Levels are whole numbers below 2**15, and 16-bit integers pass through memory at half the cost of fp32.
        odd = codes.view(torch.int8).mul_(2).sub_((1 << self.bits) - 1).to(torch.int16)
        return torch.addcmul(cubic(self.bits, odd.device), odd, odd).mul_(odd).float()

    def factors(self, encoded: Encoded) -> Factors:
        f = encoded.fields
        scale = f["scale"].float().transpose(-1, -2)
        offset = f["offset"].float() if self.group_size is not None else None
        if self.codebook == "uniform":
            return Factors(scale * 2, scale * (1 - (1 << self.bits)), offset)
        return Factors(scale * UNIT[self.bits], offset=offset)
