"""Codecs that cast: full precision, and 8-bit floating point with one scale a token and head.

Casting must never overflow: fp8 values are scaled and clamped to the largest finite one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Field, Linear, round_up

# Scales are kept in bf16 whatever the model's type: an fp16 scale would underflow for groups of tiny values.
SCALE_DTYPE = torch.bfloat16
E4M3_MAX = 448.0


@dataclass(frozen=True)
class Plain(Codec):
    """The model's own dtype: exact."""

    name: str = "dense"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("codes", dim, dtype),)

    def encode(self, x: torch.Tensor) -> Encoded:
        return Encoded(self, {"codes": x}, x.shape[-1])

    def linear(self, encoded: Encoded) -> Linear:
        return Linear(encoded.fields["codes"].float())

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> torch.Tensor:
        return encoded.fields["codes"].to(dtype)


@dataclass(frozen=True)
class Float8(Codec):
    """fp8 e4m3 with one scale a token and head, so that the largest element of each vector maps to 448.

    Format: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).
    """

    name: str = "fp8"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", dim, torch.uint8), Field("scale", 1, SCALE_DTYPE, "scales")

    def encode(self, x: torch.Tensor) -> Encoded:
        x32 = x.float()
        scale = round_up(x32.abs().amax(-1, keepdim=True) / E4M3_MAX, SCALE_DTYPE)
        divisor = scale.float()
        divisor = torch.where(divisor > 0, divisor, 1.0)
        codes = (x32 / divisor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return Encoded(self, {"codes": codes, "scale": scale}, x.shape[-1])

    def linear(self, encoded: Encoded) -> Linear:
        # The bits of an e4m3 shifted under an fp16's are that number times 2^-8 (the difference of the exponents'
        # biases), subnormals included; on CPUs this is a few times faster than the cast. 0x7F (NaN) is never written.
        bits = encoded.fields["codes"].to(torch.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        codes = half.view(torch.float16).float()
        return Linear(codes, encoded.fields["scale"].float().transpose(-1, -2) * 256.0)
