"""Integers with a scale and a zero point for each channel and group of consecutive tokens, asymmetric.

What suits keys, whose large channels are the same ones in every token. Must never mix tokens of two groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Factors, Field
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.groups import check_group_size, in_groups, rows_in_groups
from kvplug.codecs.integer import PerToken, check_bits, quantize
from kvplug.codecs.packing import code_fields, pack, unpack


@dataclass(frozen=True)
class PerChannel(Codec):
    """2, 3, 4 or 8 bits a channel, one scale and one zero point for each channel and group of tokens.

    The key side of Liu et al., "KIVI", 2024 (arXiv:2402.02750).

    Args:
        bits: 2, 3, 4 or 8.
        group_size: tokens of a group, at least 1.
    """

    bits: int = 4
    group_size: int = 64

    def __post_init__(self):
        check_bits(self.bits)
        check_group_size(self.group_size)

    @property
    def name(self) -> str:
        return f"int{self.bits}_channel"

    @property
    def granule(self) -> int:
        return self.group_size

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        rows = (Field(name, dim, SCALE_DTYPE, "scales", self.group_size) for name in ("scale", "zero"))
        return (*code_fields(dim, self.bits), *rows)

    def tokenwise(self) -> Codec:
        return PerToken(self.bits)

    def encode(self, x: torch.Tensor) -> Encoded:
        levels = (1 << self.bits) - 1
        parts = [quantize(part, levels, along=3) for part in in_groups(x.float(), self.group_size)]
        codes, scale, zero = (torch.cat([t.flatten(2, 3) for t in each], dim=2) for each in zip(*parts, strict=True))
        return Encoded(self, {**pack(codes, self.bits), "scale": scale, "zero": zero}, x.shape[-1])

    def codes(self, encoded: Encoded) -> torch.Tensor:
        f = encoded.fields
        codes, scale = unpack(f, self.bits, encoded.dim).float(), f["scale"].float()
        rows = rows_in_groups(scale, self.group_size, encoded.tokens)
        for part, row in zip(in_groups(codes, self.group_size), rows, strict=True):
            part.mul_(row[:, :, :, None])
        return codes[None]

    def factors(self, encoded: Encoded) -> Factors:
        return Factors(offset=encoded.fields["zero"].float())
