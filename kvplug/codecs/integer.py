"""Integer codecs, token-wise: one scale and one zero point for each token and head, asymmetric.

Codes are chosen against the scale and zero point as stored: rounding those must never add an error of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Factors, Field, bf16_above, bf16_below
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.packing import BITS, code_fields, pack, unpack_planes


def quantize(x: torch.Tensor, levels: int, along: int = -1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Asymmetric rounding to the codes 0 … levels of each group, which is what lies along one dimension.

    x fp32 → codes uint8 of its shape, scale and zero in 16 bits with `along` reduced to 1. The zero point is the end of
    the range that is smaller in magnitude; it is rounded outwards and the scale up, so every element lies within the
    codes' range and comes back within half of the stored scale.
    """
    low, high = x.aminmax(dim=along, keepdim=True)
    # Where the lower end is the larger one, the group is mirrored, and scale and zero point are stored negative.
    sign = 1.0 - 2.0 * (low + high < 0).float()
    near = bf16_below(torch.minimum(low * sign, high * sign))
    far = torch.maximum(low * sign, high * sign)
    scale = bf16_above((far - near) / levels)
    step = torch.where(scale > 0, scale, 1.0)
    codes = (x * sign).sub_(near).div_(step).round_().clamp_(0, levels).to(torch.uint8)
    return codes, (scale * sign).to(SCALE_DTYPE), (near * sign).to(SCALE_DTYPE)


def check_bits(bits: int) -> None:
    """Raises ValueError where no codes of `bits` bits can be packed."""
    if bits not in BITS:
        raise ValueError(f"bits={bits!r} is not accepted; use one of {', '.join(map(str, BITS))}")


@dataclass(frozen=True)
class PerToken(Codec):
    """2, 3, 4 or 8 bits a channel, one scale and one zero point a token and head.

    The value side of Liu et al., "KIVI", 2024 (arXiv:2402.02750), with the whole head as one group.
    """

    bits: int = 8

    def __post_init__(self):
        check_bits(self.bits)

    @property
    def name(self) -> str:
        return "int8" if self.bits == 8 else f"int{self.bits}_token"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        scales = (Field(name, 1, SCALE_DTYPE, "scales") for name in ("scale", "zero"))
        return (*code_fields(dim, self.bits), *scales)

    def encode(self, x: torch.Tensor) -> Encoded:
        codes, scale, zero = quantize(x.float(), (1 << self.bits) - 1)
        return Encoded(self, {**pack(codes, self.bits), "scale": scale, "zero": zero}, x.shape[-1])

    def codes(self, encoded: Encoded) -> torch.Tensor:
        return unpack_planes(encoded.fields, self.bits).float()

    def factors(self, encoded: Encoded) -> Factors:
        return Factors(*(encoded.fields[name].float().transpose(-1, -2) for name in ("scale", "zero")))
