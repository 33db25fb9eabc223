"""How a block of keys or values is written in bytes: the protocol that every codec keeps.

A codec never decides where a block lives or which tokens stay, and it computes in fp32 whatever it is given.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Field:
    """One tensor that a codec stores: `width` elements of `dtype` for every `share` heads and every `every` tokens.

    `kind` says how it is counted: "codes" (the K or V themselves) or "scales" (scales, zero points and offsets).
    """

    name: str
    width: int
    dtype: torch.dtype
    kind: str = "codes"
    every: int = 1
    share: int = 1

    def rows(self, tokens: int) -> int:
        """Rows of the tensor for `tokens` tokens; a group that is not full has one too."""
        return -(-tokens // self.every)

    def nbytes(self, tokens: int) -> int:
        """Bytes for `tokens` tokens of the heads that share them, mostly one."""
        return self.rows(tokens) * self.width * self.dtype.itemsize


@dataclass(frozen=True)
class Encoded:
    """Keys or values of some tokens as they are stored.

    `fields` maps a field's name to a tensor `[batch, kv_heads, rows, width]`, the first one with a row for each token,
    others perhaps with one for each group of tokens, and with one head where all of them share; codes stand for `dim`
    channels.
    """

    codec: Codec
    fields: dict[str, torch.Tensor]
    dim: int

    @property
    def tokens(self) -> int:
        return next(iter(self.fields.values())).shape[2]

    def tensors(self) -> Iterator[torch.Tensor]:
        return iter(self.fields.values())

    def narrow(self, start: int, length: int) -> Encoded:
        """Views of the tokens `start : start + length`; nothing is copied. `start` is a multiple of the granule."""
        if self.codec.granule == 1:
            return Encoded(self.codec, {k: t.narrow(2, start, length) for k, t in self.fields.items()}, self.dim)
        parts = {}
        for f in self.codec.fields(self.dim, torch.float32):
            parts[f.name] = self.fields[f.name].narrow(2, start // f.every, f.rows(length))
        return Encoded(self.codec, parts, self.dim)

    def decode(self, dtype: torch.dtype) -> torch.Tensor:
        """The tokens as `[batch, kv_heads, tokens, dim]` in `dtype`."""
        return self.codec.decode(self, dtype)

    def codes(self) -> torch.Tensor:
        return self.codec.codes(self)

    def factors(self) -> Factors:
        return self.codec.factors(self)


@dataclass(frozen=True)
class Factors:
    """What makes numbers of codes: x = unrotate(codes * scale + zero + offset of the token's group) + sparse.

    `scale` and `zero` are fp32 `[batch, kv_heads, 1, tokens]` or None (1 and 0), laid out to multiply a row of scores:
    a score costs one product with the codes, and scale and zero are applied to the scores rather than to every element.
    `offset` is fp32 `[batch, kv_heads, groups, dim]` or None (0), one row for every granule of tokens, so that its
    product costs a granule's share of the codes'. `sparse` is what a few slots have beside, or None: which ones, int64
    `[batch, kv_heads, n]`, each at most once or with zeros, and fp32 `[batch, kv_heads, n, head_dim]`.
    """

    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    sparse: tuple[torch.Tensor, torch.Tensor] | None = None


def to_planes(x: torch.Tensor, planes: int, width: int) -> torch.Tensor:
    """x `[..., dim]` as codes come (see `Codec.codes`): `[planes, ..., width]`, zero past dim."""
    if planes == 1:
        return x[None]
    lacking = planes * width - x.shape[-1]
    x = torch.nn.functional.pad(x, (0, lacking)) if lacking else x
    return x.unflatten(-1, (planes, width)).movedim(-2, 0)


def from_planes(planes: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `to_planes`: `[planes, ..., width]` → `[..., dim]`."""
    return planes[0] if len(planes) == 1 else planes.movedim(0, -2).flatten(-2)[..., :dim]


class Codec:
    """Encodes and decodes K or V. Subclasses are frozen dataclasses without state: one object serves every layer.

    `bits` is the width of a code. `granule` is the number of tokens of an indivisible group along time; 1 means that
    any token can be appended, dropped or cropped by itself. The first field has a row for each token.
    """

    name: str
    bits: int
    granule: int = 1

    def fields(self, dim: int, dtype: torch.dtype) -> tuple[Field, ...]:
        """What is stored for a token and head of width `dim`, for a model that computes in `dtype`."""
        raise NotImplementedError

    def encode(self, x: torch.Tensor) -> Encoded:
        """x `[batch, kv_heads, tokens, dim]` of any floating dtype → what is stored."""
        raise NotImplementedError

    def codes(self, encoded: Encoded) -> torch.Tensor:
        """The codes as attention multiplies them, fp32 `[planes, batch, kv_heads, tokens, width]`.

        Channel p * width + i lies at place i of plane p, as the parts of a byte come; there is one plane where nothing
        is packed. Places past dim hold anything finite.
        """
        raise NotImplementedError

    def factors(self, encoded: Encoded) -> Factors:
        """What the codes are multiplied with and what is added."""
        return Factors()

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """The codec's rotation along the last dimension; the identity where there is none."""
        return x

    def unrotate(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`."""
        return x

    def decode(self, encoded: Encoded, dtype: torch.dtype) -> torch.Tensor:
        """What was encoded, within the codec's error, as `[batch, kv_heads, tokens, dim]` in `dtype`."""
        x, factors = from_planes(self.codes(encoded), encoded.dim), self.factors(encoded)
        if factors.scale is not None:
            x = x * factors.scale.transpose(-1, -2)
        if factors.zero is not None:
            x = x + factors.zero.transpose(-1, -2)
        if factors.offset is not None:
            x = x + factors.offset.repeat_interleave(self.granule, dim=2)[:, :, : x.shape[2]]
        x = self.unrotate(x)
        if factors.sparse is not None:
            slots, rows = factors.sparse
            x = x.scatter_add(2, slots[..., None].expand_as(rows), rows)
        if dtype == torch.float16:
            # A value near fp16's largest may come back just above it.
            x = x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
        return x.to(dtype)

    def nbytes(self, tokens: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> int:
        """Exact bytes of `tokens` tokens of `heads` heads of one sequence, scales and zero points included."""
        return sum(heads // f.share * f.nbytes(tokens) for f in self.fields(dim, dtype))

    def tokenwise(self) -> Codec:
        """The codec for stores where tokens come and go one by one: granule 1, and as close to this one as can be."""
        if self.granule != 1:
            raise NotImplementedError
        return self

    def check(self, dim: int) -> None:
        """Raises ValueError, naming the numbers, where the codec can't write vectors of width `dim`."""


# A bfloat16 is the upper half of an fp32: dropping the lower half rounds towards zero, and adding just less than one
# unit of the upper half first rounds away from it.
_UPPER, _ALMOST_ONE = -0x10000, 0xFFFF


def bf16_below(x: torch.Tensor) -> torch.Tensor:
    """The largest bfloat16 that is not above the finite fp32 `x`, as fp32."""
    bits = x.contiguous().view(torch.int32)
    return (bits + ((bits >> 31) & _ALMOST_ONE)).bitwise_and_(_UPPER).view(torch.float32)


def bf16_above(x: torch.Tensor) -> torch.Tensor:
    """The smallest bfloat16 that is not below the finite fp32 `x`, which is not negative, as fp32."""
    return (x.contiguous().view(torch.int32) + _ALMOST_ONE).bitwise_and_(_UPPER).view(torch.float32)


# Elements for which several scales are tried at once, to bound the memory of a long prompt.
CANDIDATE_ELEMENTS = 1 << 14


def in_pieces(encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...]], x: torch.Tensor) -> list[torch.Tensor]:
    """What `encode` makes of x `[batch, kv_heads, tokens, dim]`, token by token independent, a few tokens at a time."""
    # Shapes alone need no memory, and a plan for a million tokens must not go through them piece by piece.
    step = max(CANDIDATE_ELEMENTS // max(x[:, :, :1].numel(), 1), 1) if not x.is_meta else max(x.shape[2], 1)
    parts = [encode(piece) for piece in x.split(step, dim=2)]
    return [p[0] if len(p) == 1 else torch.cat(p, dim=2) for p in zip(*parts, strict=True)]


@functools.lru_cache(maxsize=16)
def hadamard(block: int, device: torch.device) -> torch.Tensor:
    """The normalised Sylvester–Hadamard matrix `[block, block]` in fp32: symmetric and its own inverse."""
    h = torch.ones(1, 1, dtype=torch.float32, device=device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
    return h / math.sqrt(block)


def rotate_blocks(x: torch.Tensor) -> torch.Tensor:
    """Hadamard rotation along the last dimension, in blocks of its largest power-of-two divisor (80: 5 × 16)."""
    dim = x.shape[-1]
    block = dim & -dim
    if block == 1:
        return x.float()
    h = hadamard(block, x.device)
    return (x.float().unflatten(-1, (dim // block, block)) @ h).flatten(-2)
