"""Codecs that cast: full precision, and 8-bit floating point with one scale a token and head.

Casting must never overflow: fp8 values are scaled and clamped to the largest finite one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Factors, Field, bf16_above, in_pieces

# Scales are kept in bf16 whatever the model's type: an fp16 scale would underflow for groups of tiny values.
SCALE_DTYPE = torch.bfloat16
# By name: torch's type, and the largest number that it holds.
FORMATS = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}
# An fp8 element's error depends on where it lies between two powers of two, so scales within an octave are tried, and
# the one with the least squared error is kept: it is the few largest channels that gain.
PHASES = 8


@dataclass(frozen=True)
class Plain(Codec):
    """The model's own dtype: exact."""

    name: str = "dense"
    bits: int = 32

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return (Field("codes", dim, dtype),)

    def encode(self, x: torch.Tensor) -> Encoded:
        return Encoded(self, {"codes": x}, x.shape[-1])

    def codes(self, encoded: Encoded) -> torch.Tensor:
        return encoded.fields["codes"].float()[None]

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> torch.Tensor:
        return encoded.fields["codes"].to(dtype)


@dataclass(frozen=True)
class Float8(Codec):
    """fp8 with one scale a token and head, the best of eight under which no element exceeds the largest number.

    Formats: Micikevicius et al., "FP8 Formats for Deep Learning", 2022 (arXiv:2209.05433).

    Args:
        format: "e4m3" (3 bits of mantissa, up to 448) or "e5m2" (2 bits, up to 57,344).
    """

    format: str = "e4m3"

    def __post_init__(self):
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} is not accepted; use one of {', '.join(FORMATS)}")

    @property
    def bits(self) -> int:
        return 8

    @property
    def name(self) -> str:
        return "fp8" if self.format == "e4m3" else f"fp8_{self.format}"

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return Field("codes", dim, torch.uint8), Field("scale", 1, SCALE_DTYPE, "scales")

    def encode(self, x: torch.Tensor) -> Encoded:
        codes, scale = in_pieces(self._encode, x)
        return Encoded(self, {"codes": codes, "scale": scale}, x.shape[-1])

    def _encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.float()
        dtype, largest = FORMATS[self.format]
        least = x.abs().amax(-1, keepdim=True) / largest
        phases = 2.0 ** (torch.arange(PHASES, dtype=torch.float32, device=x.device) / PHASES)
        scale = bf16_above((least * phases)[..., None])  # [batch, kv_heads, tokens, phases, 1]
        divisor = torch.where(scale > 0, scale, 1.0)
        scaled = x[..., None, :] / divisor
        codes = scaled.clamp(-largest, largest).to(dtype)
        error = ((codes.float() - scaled) * divisor).square().sum(-1, keepdim=True)
        best = error.argmin(-2, keepdim=True)
        codes = codes.view(torch.uint8).take_along_dim(best, dim=-2)
        return codes.squeeze(-2), scale.take_along_dim(best, dim=-2).squeeze(-2).to(SCALE_DTYPE)

    def codes(self, encoded: Encoded) -> torch.Tensor:
        bits = encoded.fields["codes"].view(torch.int8).to(torch.int16)
        if self.format == "e5m2":
            # The upper byte of an fp16.
            return bits.bitwise_left_shift_(8).view(torch.float16).float()[None]
        # The bits of an e4m3 shifted under an fp16's are that number times 2^-8 (the difference of the exponents'
        # biases), subnormals included; on CPUs this is a few times faster than the cast. Widening repeats the sign, so
        # one copy of it has to be cleared. 0x7F (NaN) is never written.
        return bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16).float()[None]

    def factors(self, encoded: Encoded) -> Factors:
        scale = encoded.fields["scale"].float().transpose(-1, -2)
        return Factors(scale if self.format == "e5m2" else scale * 256.0)
