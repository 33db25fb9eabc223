"""How keys or values of several layers are written together: the layers' heads side by side, as if they were one.

A joint codec encodes `[batch, members * kv_heads, tokens, head_dim]`, and `part` gives what one of the layers reads of
it. Tokens are independent of each other, but for those of a group that are kept apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvplug.codecs.base import Codec, Encoded, Factors, Field
from kvplug.codecs.cast import SCALE_DTYPE
from kvplug.codecs.groups import check_group_size, group_mean, spread


class JointCodec(Codec):
    """Encodes what `members` layers hold of one side together."""

    members: int

    def to(self, device: torch.device) -> JointCodec:
        """The same for tensors on `device`."""
        return self

    def part(self, encoded: Encoded, member: int) -> Encoded:
        """What layer number `member` reads."""
        raise NotImplementedError


def part_of(encoded: Encoded, member: int, members: int) -> Encoded:
    """What layer number `member` reads of what `members` layers hold side by side, in any codec."""
    if isinstance(encoded.codec, JointCodec):
        return encoded.codec.part(encoded, member)
    return Encoded(encoded.codec, {name: _own(x, member, members) for name, x in encoded.fields.items()}, encoded.dim)


def _own(x: torch.Tensor, member: int, members: int) -> torch.Tensor:
    heads = x.shape[1] // members
    return x.narrow(1, member * heads, heads)


@dataclass(frozen=True)
class Merged(JointCodec):
    """Two layers' vectors as one direction and a length for each layer, around a mean of each layer's own.

        x = mean of the group + length · direction (+ difference, for `distinct` tokens of a group)

    As MiniCache (Liu et al., 2024, arXiv:2405.14366) keeps one direction of two layers and tokens apart that it fits
    badly. There the direction lies on the arc between both and lengths are those of the vectors. Here the mean of a
    group of tokens, in bf16, is taken off first, and direction and lengths are those of least squared error, so that a
    layer may have a length of either sign; and the tokens that are kept apart are a fixed number of each group, the
    worst ones, so that bytes are known beforehand.

    Args:
        inner: the codec of the direction, whose tokens are independent; `Plain` keeps the model's dtype.
        group_size: tokens of a group, up to 256.
        distinct: how many of them have their difference, by head and layer.
    """

    inner: Codec
    group_size: int = 32
    distinct: int = 2
    members = 2

    def __post_init__(self):
        if self.inner.granule != 1:
            raise ValueError(f"inner={self.inner!r} has groups of tokens; a codec without them is accepted")
        check_group_size(self.group_size)
        if self.group_size > 256:
            raise ValueError(f"group_size={self.group_size!r} is not valid; up to 256 tokens are accepted")
        whole = isinstance(self.distinct, int) and not isinstance(self.distinct, bool)
        if not whole or not 1 <= self.distinct <= self.group_size:
            raise ValueError(f"distinct={self.distinct!r} is not valid; 1 to group_size={self.group_size} is accepted")

    @property
    def name(self) -> str:
        return f"merged {self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def granule(self) -> int:
        return self.group_size

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        inner = self.inner.fields(dim, dtype)
        return (
            *(Field(f"direction.{f.name}", f.width, f.dtype, f.kind, share=2) for f in inner),
            Field("length", 1, SCALE_DTYPE, "scales"),
            Field("mean", dim, SCALE_DTYPE, "scales", self.group_size),
            Field("which", self.distinct, torch.uint8, "scales", self.group_size),
            Field("difference", self.distinct * dim, dtype, "codes", self.group_size),
        )

    def check(self, dim: int) -> None:
        self.inner.check(dim)

    def encode(self, x: torch.Tensor) -> Encoded:
        tokens, dim = x.shape[2:]
        mean = group_mean(x.float(), self.group_size).to(SCALE_DTYPE)
        y = x.float() - spread(mean.float(), self.group_size, tokens)
        encoded = self.inner.encode(principal(*y.chunk(2, dim=1)).to(x.dtype))
        fields = {f"direction.{name}": field for name, field in encoded.fields.items()}
        # Against what the codec gives back, whose length need not be 1.
        direction = encoded.decode(torch.float32)
        square = direction.square().sum(-1, keepdim=True).repeat(1, 2, 1, 1)
        direction = direction.repeat(1, 2, 1, 1)
        length = (y * direction).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)
        fields["length"], fields["mean"] = length.to(SCALE_DTYPE), mean
        lacking = -tokens % self.group_size
        difference = y - direction * fields["length"].float()
        difference = torch.nn.functional.pad(difference, (0, 0, 0, lacking))
        missed = difference.norm(dim=-1).unflatten(-1, (-1, self.group_size))
        which = missed.topk(self.distinct, dim=-1).indices.sort(dim=-1).values
        fields["which"] = which.to(torch.uint8)
        index = which[..., None].expand(*which.shape, dim)
        kept = difference.unflatten(2, (-1, self.group_size)).gather(3, index)
        fields["difference"] = kept.flatten(3).to(x.dtype)
        return Encoded(self, fields, dim)

    def part(self, encoded: Encoded, member: int) -> Encoded:
        own = {k: x if k.startswith("direction.") else _own(x, member, 2) for k, x in encoded.fields.items()}
        return Encoded(MergedPart(self), own, encoded.dim)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([self.part(encoded, member).decode(dtype) for member in (0, 1)], dim=1)


def principal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The unit vector in which two vectors have the most squared length together, `[…, dim]`; zero where both are."""
    product = (first * second).sum(-1, keepdim=True)
    more = first.square().sum(-1, keepdim=True) - second.square().sum(-1, keepdim=True)
    angle = torch.atan2(2 * product, more) / 2
    return torch.nn.functional.normalize(angle.cos() * first + angle.sin() * second, dim=-1)


@dataclass(frozen=True)
class MergedPart(Codec):
    """What one of two layers reads of `Merged`."""

    whole: Merged

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def bits(self) -> int:
        return self.whole.bits

    @property
    def granule(self) -> int:
        return self.whole.granule

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.whole.fields(dim, dtype)

    def _direction(self, encoded: Encoded) -> Encoded:
        fields = {k.removeprefix("direction."): x for k, x in encoded.fields.items() if k.startswith("direction.")}
        return Encoded(self.whole.inner, fields, encoded.dim)

    def codes(self, encoded: Encoded) -> torch.Tensor:
        return self._direction(encoded).codes()

    def factors(self, encoded: Encoded) -> Factors:
        inner = self._direction(encoded).factors()
        length = encoded.fields["length"].float().transpose(-1, -2)
        scale = length if inner.scale is None else inner.scale * length
        zero = None if inner.zero is None else inner.zero * length
        return Factors(scale, zero, self.rotate(encoded.fields["mean"].float()), self._sparse(encoded))

    def _sparse(self, encoded: Encoded) -> tuple[torch.Tensor, torch.Tensor]:
        which, rows = encoded.fields["which"].long(), encoded.fields["difference"].float()
        first = torch.arange(which.shape[2], device=which.device)[:, None] * self.granule
        slots = (which + first).flatten(2)
        rows = rows.unflatten(-1, (self.whole.distinct, encoded.dim)).flatten(2, 3)
        if encoded.tokens % self.granule:
            # The last group is cut.
            there = slots < encoded.tokens
            slots, rows = slots.clamp(max=encoded.tokens - 1), rows * there[..., None]
        return slots, rows

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.inner.rotate(x)

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.inner.unrotate(x)


@dataclass(frozen=True, eq=False)
class LowRank(JointCodec):
    """All heads of several layers as one vector, of which the coordinates in a basis of fewer directions are kept.

        x of head h = coordinates @ basis[h]

    Layers share the coordinates, as in xKV (Chang et al., 2025, arXiv:2503.18893). Attention never expands them: the
    query is taken to the basis and the output back.

    Args:
        inner: the codec of the coordinates.
        basis: fp32 `[members * kv_heads, rank, head_dim]`, orthonormal over heads and channels together.
        members: layers.
    """

    inner: Codec
    basis: torch.Tensor
    members: int

    def to(self, device: torch.device) -> LowRank:
        return self if self.basis.device == device else replace(self, basis=self.basis.to(device))

    @property
    def rank(self) -> int:
        return self.basis.shape[1]

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.inner.name}"

    @property
    def bits(self) -> int:
        return self.inner.bits

    @property
    def granule(self) -> int:
        return self.inner.granule

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        heads = self.basis.shape[0]
        return tuple(
            Field(f.name, f.width, f.dtype, f.kind, f.every, heads) for f in self.inner.fields(self.rank, dtype)
        )

    def check(self, dim: int) -> None:
        if self.basis.shape[-1] != dim:
            raise ValueError(f"the basis is for heads of width {self.basis.shape[-1]}, and these have {dim}")
        self.inner.check(self.rank)

    def encode(self, x: torch.Tensor) -> Encoded:
        flat = x.float().transpose(1, 2).flatten(-2)
        coordinates = (flat @ self.basis.transpose(-1, -2).flatten(0, 1))[:, None]
        return Encoded(self, self.inner.encode(coordinates.to(x.dtype)).fields, self.rank)

    def part(self, encoded: Encoded, member: int) -> Encoded:
        return Encoded(LowRankPart(self, member), encoded.fields, self.rank)

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> torch.Tensor:
        return torch.cat([self.part(encoded, member).decode(dtype) for member in range(self.members)], dim=1)


@dataclass(frozen=True, eq=False)
class LowRankPart(Codec):
    """What one of several layers reads of `LowRank`: one head of codes for all heads of the layer."""

    whole: LowRank
    member: int

    @property
    def name(self) -> str:
        return self.whole.name

    @property
    def bits(self) -> int:
        return self.whole.bits

    @property
    def granule(self) -> int:
        return self.whole.granule

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        return self.whole.inner.fields(dim, dtype)

    def codes(self, encoded: Encoded) -> torch.Tensor:
        return self.whole.inner.codes(encoded)

    def factors(self, encoded: Encoded) -> Factors:
        return self.whole.inner.factors(encoded)

    @property
    def basis(self) -> torch.Tensor:
        """The layer's own part, `[kv_heads, rank, head_dim]`."""
        return self.whole.basis.chunk(self.whole.members)[self.member]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.inner.rotate(x.float() @ self.basis.transpose(-1, -2))

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.inner.unrotate(x) @ self.basis
