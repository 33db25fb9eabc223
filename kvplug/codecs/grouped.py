"""Integers with a scale and a zero point for each group of channels within a token, asymmetric.

Must never round a width up to whole groups: a width that isn't a multiple of the group is refused.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.codecs.base import Codec, Encoded, Field
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.groups import check_group_size
from kvplug.codecs.integer import check_bits, quantize
from kvplug.codecs.packing import code_fields, pack, unpack


@dataclass(frozen=True)
class GroupWise(Codec):
    """2, 3, 4 or 8 bits a channel, one scale and one zero point for each group of channels of a token and head.

    As Sheng et al., "FlexGen", 2023 (arXiv:2303.06865).

    Args:
        bits: 2, 3, 4 or 8.
        group_size: channels of a group, at least 1; it must divide head_dim.
    """

    bits: int = 4
    group_size: int = 32

    def __post_init__(self):
        check_bits(self.bits)
        check_group_size(self.group_size)

    @property
    def name(self) -> str:
        return f"int{self.bits}_group"

    def check(self, dim: int) -> None:
        if dim % self.group_size:
            accepted = ", ".join(str(size) for size in range(1, dim + 1) if dim % size == 0)
            raise ValueError(f"group_size={self.group_size} doesn't divide head_dim={dim}; use one of {accepted}")

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        self.check(dim)
        scales = (Field(name, dim // self.group_size, SCALE_DTYPE, "scales") for name in ("scale", "zero"))
        return (*code_fields(dim, self.bits), *scales)

    def encode(self, x: torch.Tensor) -> Encoded:
        dim = x.shape[-1]
        self.check(dim)
        groups = x.float().unflatten(-1, (dim // self.group_size, self.group_size))
        codes, scale, zero = quantize(groups, (1 << self.bits) - 1)
        fields = {**pack(codes.flatten(-2), self.bits), "scale": scale.squeeze(-1), "zero": zero.squeeze(-1)}
        return Encoded(self, fields, dim)

    def codes(self, encoded: Encoded) -> torch.Tensor:
        f = encoded.fields
        codes = unpack(f, self.bits, encoded.dim).float()
        groups = codes.unflatten(-1, (-1, self.group_size))
        groups.mul_(f["scale"].float()[..., None]).add_(f["zero"].float()[..., None])
        return codes[None]
