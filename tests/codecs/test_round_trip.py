"""What comes back from each codec: within its bound, bit for bit what the format says, and never NaN or infinity.

Bounds. Integers: codes are chosen against the stored scale, so an element is off by half a step at most; the step is
range / levels, made up to 2**-7 larger by rounding the zero point down and the scale up to bfloat16. The rotation of
int4 keeps lengths, so its error is bounded as a vector. fp8 e4m3 has 3 bits of mantissa: 2**-4 of an element, or half
of its smallest number, 2**-10, times the scale, which is up to twice the one that maps the largest element to 448.
"""

import pytest
import torch

from kvplug.codecs import CODECS
from tests import codec_twins as twins

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LOW_BIT = ["fp8", "int8", "int4"]
INTEGER = {"int8": 255, "int4": 15}
# One rounding to the result's dtype, relative to the largest element.
ROUNDING = {torch.float32: 2**-22, torch.float16: 2**-11, torch.bfloat16: 2**-8}
# Two of bfloat16's smallest numbers: no scale or zero point can be finer.
TINIEST = 2**-132


def block(*shape, dtype=torch.float32, spread=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * spread).to(dtype)


def round_trip(name, x):
    return CODECS[name].decode(CODECS[name].encode(x), x.dtype)


def step(x, levels):
    """The coarsest step that the format may choose for each vector: its range is widened by at most one bfloat16
    spacing of its lower end, the scale by one of its own (2**-7 each, relative)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return (high - low + low.abs() * 2**-7) / levels * (1 + 2**-7)


def bound(name, x):
    """The largest error of each element (fp8, int8) or of each vector's length (int4), before rounding to x's dtype."""
    x = x.double()
    if name == "fp8":
        scale = x.abs().amax(-1, keepdim=True) / 448 * 2 * (1 + 2**-7)
        return (x.abs() * 2**-4).maximum(scale * 2**-10)
    if name == "int8":
        return (step(x, 255) / 2).expand_as(x)
    rotated = x @ twins.hadamard(x.shape[-1]).double()
    return step(rotated, 15) / 2 * x.shape[-1] ** 0.5


def assert_within(name, x, result):
    error = (result.double() - x.double()).abs()
    rounding = x.double().abs().amax(-1, keepdim=True) * ROUNDING[x.dtype] * 2 + TINIEST
    if name == "int4":
        error = error.norm(dim=-1, keepdim=True)
        rounding = rounding * x.shape[-1] ** 0.5
    assert torch.isfinite(result).all()
    assert (error <= bound(name, x) + rounding).all()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_error_bound(name, dtype, dim):
    x = block(2, 3, 17, dim, dtype=dtype, spread=3.0)
    result = round_trip(name, x)
    assert result.shape == x.shape
    assert result.dtype == dtype
    assert_within(name, x, result)
    # The bound is not idle: a codec of half the bits would break it.
    assert (result - x).abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_precision_is_exact(dtype):
    x = block(2, 3, 5, 16, dtype=dtype)
    assert torch.equal(round_trip("dense", x), x)


def loud(dtype):
    """Vectors with a mean of their own."""
    return block(2, 3, 33, 80, dtype=dtype, spread=5.0) + block(2, 3, 33, 1, dtype=dtype, seed=1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_int8_are_those_of_the_format(dtype):
    x = loud(dtype)
    encoded = CODECS["int8"].encode(x)
    for field, expected in zip(("codes", "scale", "zero"), twins.integer_parts(x, 255), strict=True):
        assert torch.equal(encoded.fields[field].float(), expected)
    assert torch.equal(round_trip("int8", x), twins.int8(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_fp8_are_those_of_the_format(dtype):
    """Every vector has one of the eight scales, the values that belong to it, and no other scale's error is smaller
    (but for the order in which eighty squares are added up)."""
    x = loud(dtype)
    encoded = CODECS["fp8"].encode(x)
    stored, scale = encoded.fields["codes"].view(torch.float8_e4m3fn).float(), encoded.fields["scale"].float()
    values, scales, errors = twins.fp8_candidates(x)
    chosen = (scales == scale).long().argmax(0, keepdim=True)
    assert torch.equal(scales.take_along_dim(chosen, 0)[0], scale)
    assert torch.equal(values.take_along_dim(chosen, 0)[0], stored)
    assert (errors.take_along_dim(chosen, 0)[0] <= errors.amin(0) * (1 + 80 * 2**-22)).all()
    assert (chosen > 0).any(), "a larger scale never paid, so nothing was tried"
    assert torch.equal(round_trip("fp8", x), (stored * scale).to(dtype))


@pytest.mark.parametrize("dim", [16, 80, 100, 128])
def test_bytes_of_int4_are_those_of_the_format(dim):
    """Whole numbers that are multiples of the rotation's root: every product is exact, on any processor."""
    root = (dim & -dim) ** 0.5
    x = torch.randint(-64, 64, (2, 3, 33, dim), generator=torch.Generator().manual_seed(3)).float()
    x = x * root if root == int(root) else x
    rotated = (x.double() @ twins.hadamard(dim).double()).float()
    if root != int(root):
        # Where both ends are equally far from zero, rounding decides whether the vector is mirrored: leave those out.
        ends = rotated.amax(-1) + rotated.amin(-1)
        plain = (ends.abs() > 1e-3).all(dim=0).all(dim=0)
        assert plain.sum() > 20
        x, rotated = x[:, :, plain], rotated[:, :, plain]
    codes, scale, zero = twins.integer_parts(rotated, 15)
    encoded = CODECS["int4"].encode(x)
    half = (dim + 1) // 2
    packed = encoded.fields["codes"].int()
    assert packed.shape[-1] == half
    stored = torch.cat([packed & 15, packed >> 4], dim=-1)[..., :dim].float()
    same = stored == codes
    if root == int(root):
        assert same.all()
        assert torch.equal(encoded.fields["scale"].float(), scale)
        assert torch.equal(encoded.fields["zero"].float(), zero)
    else:  # the root is not a binary fraction: an element on the very edge may fall on either side
        assert same.float().mean() > 0.999
        assert (stored - codes).abs().max() <= 1


EDGES = {
    "zero": (0.0, 0.0),
    "constant": (3.7, 3.7),
    "negative_constant": (-3.7, -3.7),
    "huge": (-40000.0, 40000.0),
    "tiny": (-1e-6, 1e-6),
    "one_tiny_step": (1.0, 1.0 + 2**-9),
    "only_negative": (-9.0, -8.0),
    "only_positive": (8.0, 9.0),
}


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_groups_on_the_edge(name, dtype, edge):
    """All values alternate between the two ends."""
    x = torch.tensor(edge).repeat(32).expand(1, 2, 3, 64).to(dtype)
    result = round_trip(name, x)
    assert torch.isfinite(result).all()
    assert_within(name, x, result)
    if edge[0] == edge[1]:
        # A constant comes back within one unit of the 16-bit type that its scale and zero point are stored in.
        assert ((result - x).abs() <= abs(edge[0]) * 2**-7).all()
    if edge == (0.0, 0.0):
        assert torch.equal(result, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_one_outlier_channel(name, dtype):
    """One channel is offset by 500, as the biases of some models' keys do; the bound follows the range."""
    x = block(1, 2, 9, 64, dtype=dtype)
    x[..., 5] += 500
    assert_within(name, x, round_trip(name, x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_arithmetic_is_in_fp32(name, dtype):
    """What is made of 16-bit values is made of the same values in fp32: nothing is rounded on the way."""
    x = block(2, 2, 9, 64, dtype=dtype, spread=100.0)
    a, b = CODECS[name].encode(x), CODECS[name].encode(x.float())
    for field in a.fields:
        assert torch.equal(a.fields[field], b.fields[field])


@pytest.mark.parametrize("name", CODECS)
def test_rounding_twice_is_rounding_once_within_the_bound(name):
    """What comes back is encoded once more without moving further than one more bound: errors don't run away."""
    x = block(1, 2, 9, 64)
    for _ in range(3):
        again = round_trip(name, x)
        if name == "dense":
            assert torch.equal(again, x)
        else:
            assert_within(name, x, again)
        x = again
