"""Integer codecs, token-wise: one scale and one zero point for each token and head, asymmetric.

int8 codes are stored as they are; int4 is encoded after a Hadamard rotation along head_dim and packed two to a byte.
The codes are chosen against the scale and zero point as stored, so rounding those to 16 bits adds no error of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Field, Linear, bf16_above, bf16_below, rotate_blocks
from kvplug.codecs.cast import SCALE_DTYPE


def quantize(x: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric rounding along the last dimension to the codes 0 … levels.

    x fp32 `[..., dim]` → codes uint8 `[..., dim]`, scale and zero `[..., 1]` in 16 bits. The zero point is the end of
    the range that is smaller in magnitude; it is rounded outwards and the scale up, so every element lies within the
    codes' range and comes back within half of the stored scale.
    """
    low, high = x.aminmax(dim=-1, keepdim=True)
    # Where the lower end is the larger one, the vector is mirrored, and scale and zero point are stored negative.
    sign = torch.where(low + high < 0, -1.0, 1.0)
    near = bf16_below(torch.minimum(low * sign, high * sign))
    far = torch.maximum(low * sign, high * sign)
    scale = bf16_above((far - near) / levels)
    step = torch.where(scale > 0, scale, 1.0)
    codes = (x * sign).sub_(near).div_(step).round_().clamp_(0, levels).to(torch.uint8)
    return codes, (scale * sign).to(SCALE_DTYPE), (near * sign).to(SCALE_DTYPE)


def pack_halves(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes `[..., dim]` → bytes `[..., ceil(dim / 2)]`.

        byte i:   bits 0–3 = channel i      bits 4–7 = channel i + ceil(dim / 2)

    Unpacking is a mask and a shift, without shuffling channels.
    """
    half = (codes.shape[-1] + 1) // 2
    low, high = codes[..., :half], codes[..., half:]
    if high.shape[-1] < half:
        high = torch.nn.functional.pad(high, (0, half - high.shape[-1]))
    return low | (high << 4)


def unpack_halves(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `pack_halves`: uint8 codes `[..., dim]`."""
    return torch.cat([packed & 0x0F, packed >> 4], dim=-1)[..., :dim]


@dataclass(frozen=True)
class Int8(Codec):
    """8 bits a channel, one scale and one zero point a token and head."""

    name: str = "int8"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", dim, torch.uint8),
            Field("scale", 1, SCALE_DTYPE, "scales"),
            Field("zero", 1, SCALE_DTYPE, "scales"),
        )

    def encode(self, x: torch.Tensor) -> Encoded:
        codes, scale, zero = quantize(x.float(), 255)
        return Encoded(self, {"codes": codes, "scale": scale, "zero": zero}, x.shape[-1])

    def linear(self, encoded: Encoded) -> Linear:
        f = encoded.fields
        return Linear(f["codes"].float(), f["scale"].float().transpose(-1, -2), f["zero"].float().transpose(-1, -2))


@dataclass(frozen=True)
class Int4(Codec):
    """4 bits a channel after a Hadamard rotation along head_dim, one scale and one zero point a token and head.

    The rotation spreads outlier channels over the vector: Ashkboos et al., "QuaRot", 2024 (arXiv:2404.00456).
    """

    name: str = "int4"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (
            Field("codes", (dim + 1) // 2, torch.uint8),
            Field("scale", 1, SCALE_DTYPE, "scales"),
            Field("zero", 1, SCALE_DTYPE, "scales"),
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_blocks(x)

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        return rotate_blocks(x)

    def encode(self, x: torch.Tensor) -> Encoded:
        codes, scale, zero = quantize(self.rotate(x), 15)
        return Encoded(self, {"codes": pack_halves(codes), "scale": scale, "zero": zero}, x.shape[-1])

    def linear(self, encoded: Encoded) -> Linear:
        f = encoded.fields
        codes = unpack_halves(f["codes"], encoded.dim).float()
        return Linear(codes, f["scale"].float().transpose(-1, -2), f["zero"].float().transpose(-1, -2))
