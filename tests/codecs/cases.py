"""The codecs that are tested, and how far each may be off.

Integers: codes are chosen against the stored scale, so an element is off by half a step at most; the step is range /
levels, made up to 2**-7 larger by rounding the zero point down and the scale up to bfloat16. fp8 has 3 (2) bits of
mantissa: 2**-4 (2**-3) of an element, or half of its smallest number, 2**-10 (2**-17), times the scale, which is up to
twice the one that maps the largest element to the largest number.

The rotated codec keeps lengths, so its error is bounded as a vector: by that of the nearest levels at any of the scales
that are tried, since the codes and the scale of least squares that follow can only lower it. If that error is the sine
of an angle, a scale that keeps the product with itself has the tangent of it. Rounding the scale to bfloat16 adds up to
2**-8 of what is written, at right angles to the error for least squares.
"""

import torch

from kvplug.codecs import Float8, GroupWise, PerChannel, PerToken, Plain, Rotated
from tests import codec_twins as twins

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CODECS = {
    "dense": Plain(),
    "fp8": Float8(),
    "fp8_e5m2": Float8("e5m2"),
    **{f"token{bits}": PerToken(bits) for bits in (8, 4, 3, 2)},
    **{f"rotated{bits}": Rotated(bits, None) for bits in (4, 3, 2)},
    **{f"rotated{bits}_groups_of_5": Rotated(bits, 5) for bits in (4, 3, 2)},
    **{f"rotated{bits}_unbiased": Rotated(bits, 5, unbiased=True) for bits in (4, 3, 2)},
    **{f"rotated{bits}_lloyd_max": Rotated(bits, None, "lloyd_max") for bits in (4, 3, 2)},
    **{f"channel{bits}_groups_of_5": PerChannel(bits, 5) for bits in (8, 4, 3, 2)},
    **{f"group{bits}": GroupWise(bits, 4) for bits in (8, 4, 3, 2)},
}
LOW_BIT = [name for name in CODECS if name != "dense"]
TOKENWISE = [name for name, codec in CODECS.items() if codec.granule == 1]
ROTATED = [name for name in CODECS if name.startswith("rotated")]
# One rounding to the result's dtype, relative to the largest element before or after.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Two of bfloat16's smallest numbers: no scale or zero point can be finer.
TINIEST = 2**-132


def fits(name, dim):
    """Whether the codec writes vectors of that width."""
    return not isinstance(CODECS[name], GroupWise) or dim % CODECS[name].group_size == 0


def block(*shape, dtype=torch.float32, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def round_trip(name, x):
    return CODECS[name].decode(CODECS[name].encode(x), x.dtype)


def step(x, levels, along=-1):
    """The coarsest step that the format may choose for each group: its range is widened by at most one bfloat16 spacing
    of its lower end, the scale by one of its own (2**-7 each, relative)."""
    low, high = x.amin(along, keepdim=True), x.amax(along, keepdim=True)
    return ((high - low + low.abs() * 2**-7) / levels * (1 + 2**-7)).expand_as(x)


def bound(name, x):
    """The largest error of each element, before rounding to x's dtype; of each vector's length for rotated codecs."""
    codec, x = CODECS[name], x.double()
    if isinstance(codec, Float8):
        mantissa, smallest, largest = {"e4m3": (2**-4, 2**-10, 448), "e5m2": (2**-3, 2**-17, 57344)}[codec.format]
        scale = x.abs().amax(-1, keepdim=True) / largest * 2 * (1 + 2**-7)
        return (x.abs() * mantissa).maximum(scale * smallest)
    if isinstance(codec, Rotated):
        return rotated_bound(codec, x)
    levels = 2**codec.bits - 1
    if isinstance(codec, PerToken):
        return step(x, levels) / 2
    along = 2 if isinstance(codec, PerChannel) else -1
    return torch.cat([step(part, levels, along) for part in x.split(codec.group_size, along)], along) / 2


def rotated_bound(codec, x):
    y = x @ twins.rotation(x.shape[-1])
    size = y.abs().amax(-1, keepdim=True)
    if codec.group_size is not None:
        groups = y.split(codec.group_size, dim=2)
        y = torch.cat([g - g.mean(2, keepdim=True).bfloat16().double() for g in groups], dim=2)
    first = y.square().mean(-1, keepdim=True).sqrt() * twins.FIRST[codec.codebook][codec.bits]
    table, length = twins.levels(codec.bits, codec.codebook), y.norm(dim=-1, keepdim=True)
    sine = torch.ones_like(length)
    for factor in twins.TRIED:
        scale = (first * factor)[..., None]
        error = (y[..., None] - table * scale).abs().amin(-1).norm(dim=-1, keepdim=True)
        sine = torch.minimum(sine, error / torch.where(length > 0, length, 1.0))
    # All signs are right, so no angle is larger than that between equal numbers and a single one.
    cosine = (1 - sine.square()).clamp(min=1 / x.shape[-1]).sqrt()
    if codec.unbiased:
        found = length * (sine / cosine + 2**-8 / cosine)
    else:
        found = length * (sine.square() + 2 * 2**-16).sqrt()
    # fp32 rounds the rotation both ways; halfway between two bfloat16 that may decide which a mean becomes, and the
    # vector that is encoded then differs by their distance.
    return found + size * x.shape[-1] ** 0.5 * (2**-20 if codec.group_size is None else 2**-7)


def assert_within(name, x, result):
    error = (result.double() - x.double()).abs()
    largest = torch.maximum(x.double().abs(), result.double().abs()).amax(-1, keepdim=True)
    rounding = largest * ROUNDING[x.dtype] * 2 + TINIEST
    if name in ROTATED:
        error = error.norm(dim=-1, keepdim=True)
        rounding = rounding * x.shape[-1] ** 0.5
    assert torch.isfinite(result).all()
    assert (error <= bound(name, x) + rounding).all()
