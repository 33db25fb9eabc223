"""What comes back from each codec: within its bound, bit for bit what the format says, and never NaN or infinity."""

import pytest
import torch

from kvplug.codecs import Float8, GroupWise, PerChannel, PerToken, Rotated
from tests import codec_twins as twins
from tests.codecs.cases import CODECS, DTYPES, LOW_BIT, assert_within, block, fits, round_trip


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 100, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_error_bound(name, dtype, dim):
    assert fits(name, dim)
    x = block(2, 3, 17, dim, dtype=dtype, spread=3.0)
    result = round_trip(name, x)
    assert result.shape == x.shape
    assert result.dtype == dtype
    assert_within(name, x, result)
    assert (result - x).abs().max() > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_full_precision_is_exact(dtype):
    x = block(2, 3, 5, 16, dtype=dtype)
    assert torch.equal(round_trip("dense", x), x)


def loud(dtype, dim=80):
    """Vectors with a mean of their own."""
    return block(2, 3, 33, dim, dtype=dtype, spread=5.0) + block(2, 3, 33, 1, dtype=dtype, seed=1)


def parts_of(codec, x):
    """The twin's codes, scale and zero point."""
    levels = 2**codec.bits - 1
    if isinstance(codec, PerToken):
        return twins.integer_parts(x, levels)
    return (twins.channel_parts if isinstance(codec, PerChannel) else twins.group_parts)(x, levels, codec.group_size)


@pytest.mark.parametrize("dim", [5, 12, 80])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("kind", [PerToken, PerChannel, GroupWise])
def test_bytes_of_integers_are_those_of_the_format(kind, bits, dtype, dim):
    """Groups of 10 tokens, the last of three; groups of as many channels as divide 80 and 5."""
    codec = kind(bits) if kind is PerToken else kind(bits, 10 if kind is PerChannel else {5: 5, 12: 6, 80: 20}[dim])
    x = loud(dtype, dim)
    encoded = codec.encode(x)
    codes, scale, zero = parts_of(codec, x)
    assert torch.equal(twins.unpacked(encoded.fields, bits, dim).float(), codes)
    assert torch.equal(encoded.fields["scale"].float(), scale)
    assert torch.equal(encoded.fields["zero"].float(), zero)

    def every(rows):
        if kind is PerToken:
            return rows
        along, size = (2, 10) if kind is PerChannel else (-1, codec.group_size)
        return rows.repeat_interleave(size, along).narrow(along, 0, x.shape[along])

    expected = codes * every(scale) + every(zero)
    assert torch.equal(codec.decode(encoded, dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_bytes_of_fp8_are_those_of_the_format(kind, dtype):
    """Every vector has one of the eight scales, the values that belong to it, and no other scale's error is smaller
    (but for the order in which eighty squares are added up)."""
    codec, x = Float8(kind), loud(dtype)
    encoded = codec.encode(x)
    stored, scale = encoded.fields["codes"].view(twins.FP8[kind][0]).float(), encoded.fields["scale"].float()
    values, scales, errors = twins.fp8_candidates(x, kind)
    chosen = (scales == scale).long().argmax(0, keepdim=True)
    assert torch.equal(scales.take_along_dim(chosen, 0)[0], scale)
    assert torch.equal(values.take_along_dim(chosen, 0)[0], stored)
    assert (errors.take_along_dim(chosen, 0)[0] <= errors.amin(0) * (1 + 80 * 2**-22)).all()
    assert (chosen > 0).any(), "a larger scale never paid, so nothing was tried"
    assert torch.equal(codec.decode(encoded, dtype), (stored * scale).to(dtype))


@pytest.mark.parametrize("dim", [16, 80, 100, 128, 7])
@pytest.mark.parametrize("group_size", [None, 16, 64])
@pytest.mark.parametrize("bits", [4, 3, 2])
@pytest.mark.parametrize(("codebook", "unbiased"), [("uniform", True), ("uniform", False), ("lloyd_max", True)])
def test_bytes_of_rotated_are_those_of_the_format(codebook, unbiased, bits, group_size, dim):
    """fp32 against the twin's fp64: a number on the very edge between two may fall on either side, and of two scales
    that do as well the other may be chosen; hardly any other."""
    codec = Rotated(bits, group_size, codebook, unbiased)
    x = block(2, 3, 150, dim, spread=3.0) + block(1, 3, 1, dim, spread=10.0, seed=1)
    encoded = codec.encode(x)
    codes, scale, offset = twins.rotated_parts(x, bits, group_size, codebook, unbiased)
    stored = twins.unpacked(encoded.fields, bits, dim)
    same = ((stored == codes) & (encoded.fields["scale"].double() == scale)).all(-1)
    assert same.float().mean() > 0.98
    if group_size is not None:
        assert torch.allclose(encoded.fields["offset"].double(), offset, rtol=2**-7, atol=1e-5)
        assert (encoded.fields["offset"].double() == offset).float().mean() > 0.99
    how = (bits, group_size, codebook)
    meant = twins.rotated_values(stored, encoded.fields["scale"], encoded.fields.get("offset"), *how)
    ours, theirs = ((y - x).norm(dim=-1) for y in (meant, twins.rotated_values(codes, scale, offset, *how)))
    assert (ours <= theirs * 1.1)[~same].all()
    # Two rotations' worth of fp32 roundings of numbers below 64.
    assert torch.allclose(codec.decode(encoded, torch.float32).double(), meant, atol=64 * 2**-20, rtol=0)


LLOYD_MAX = {2: 0.1175, 3: 0.0345, 4: 0.0095}


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("group_size", [None, 64])
@pytest.mark.parametrize("bits", LLOYD_MAX)
@pytest.mark.parametrize("codebook", ["uniform", "lloyd_max"])
def test_gaussian_vectors_are_written_as_well_as_by_lloyd_and_max(codebook, bits, group_size, dim):
    """No more than 1.05 of the least squared error that 2**bits levels can have, which is that of a known variance; and
    not below 4**-bits, which no code of that many bits gets under (but for what offset and scale add to them).

    With 2**20 elements the mean of the squared errors is off by 2 in 1000, one standard deviation."""
    x = block(1, 4, 2**20 // (4 * dim) // 64 * 64, dim)
    codec = Rotated(bits, group_size, codebook)
    error = (codec.decode(codec.encode(x), torch.float32) - x).square().mean() / x.square().mean()
    assert error < 1.05 * LLOYD_MAX[bits]
    stored = codec.nbytes(x.shape[2], 4, dim) * 8 / x.numel()
    assert error > 4.0**-stored


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_an_unbiased_scale_keeps_the_product_with_itself(bits):
    """And least squares makes it smaller, by the squared error, which is why keys are written otherwise."""
    x = block(1, 4, 64, 64)

    def ratio(**how):
        codec = Rotated(bits, None, **how)
        return (x * codec.decode(codec.encode(x), torch.float32)).sum(-1) / x.square().sum(-1)

    assert torch.allclose(ratio(unbiased=True), torch.ones(()), atol=2**-8)
    assert (ratio() < 1 - 0.5 * 4.0**-bits).float().mean() > 0.95


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
    x = torch.tensor(edge).repeat(32).expand(1, 2, 7, 64).to(dtype)
    result = round_trip(name, x)
    assert torch.isfinite(result).all()
    assert_within(name, x, result)
    if edge[0] == edge[1]:
        # A constant comes back within one unit of the 16-bit type that its scale and zero point are stored in.
        assert ((result - x).abs() <= abs(edge[0]) * 2**-7).all()
    if edge == (0.0, 0.0):
        assert torch.equal(result, x)


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_groups_along_time_on_the_edge(name, dtype, edge):
    """The same with tokens that alternate, each of them constant."""
    x = torch.tensor(edge).repeat(6)[:, None].expand(1, 2, 12, 64).to(dtype)
    result = round_trip(name, x)
    assert torch.isfinite(result).all()
    assert_within(name, x, result)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 100, 128])
@pytest.mark.parametrize("bits", [4, 3, 2])
def test_group_means_write_constant_channels_within_one_rounding_of_bfloat16(bits, dim):
    """Whatever they are: what is equal in all tokens is in the offset, and its rounding is encoded once more."""
    x = block(1, 2, 1, dim, spread=10.0).expand(-1, -1, 128, -1)
    result = Rotated(bits).decode(Rotated(bits).encode(x), torch.float32)
    length = x.norm(dim=-1)
    assert ((result - x).norm(dim=-1) <= length * 2**-8).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_one_outlier_channel(name, dtype):
    """One channel is offset by 500, as the biases of some models' keys do; the bound follows the range."""
    x = block(1, 2, 9, 64, dtype=dtype)
    x[..., 5] += 500
    assert_within(name, x, round_trip(name, x))


# Largest error of a softmax over 128 tokens of keys whose one channel is offset by 500, with queries of size 1 in it.
BIASED = {
    "exact_at_8_bits": (PerChannel(8), 1e-2),
    "default_4_bits": (Rotated(4, unbiased=True), 0.05),
}


@pytest.mark.parametrize(("codec", "limit"), BIASED.values(), ids=BIASED)
def test_a_huge_key_bias_does_not_break_the_softmax(codec, limit):
    """A scale or an offset for each channel takes the bias in; a scale for each token spends its codes on it."""
    keys = block(1, 2, 128, 64)
    keys[..., 5] += 500
    query = block(1, 2, 16, 64, seed=1)

    def weights(codec):
        read = keys if codec is None else codec.decode(codec.encode(keys), torch.float32)
        return (query @ read.transpose(-1, -2) / 8).double().softmax(-1)

    def off(codec):
        return (weights(codec) - weights(None)).abs().max()

    assert off(codec) < limit
    assert off(codec) < off(codec.tokenwise()) / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_arithmetic_is_in_fp32(name, dtype):
    """What is made of 16-bit values is made of the same values in fp32: nothing is rounded on the way."""
    x = block(2, 2, 9, 64, dtype=dtype, spread=100.0)
    a, b = CODECS[name].encode(x), CODECS[name].encode(x.float())
    for field in a.fields:
        assert torch.equal(a.fields[field], b.fields[field])


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e25, 1e36], ids=str)
@pytest.mark.parametrize("name", LOW_BIT)
def test_numbers_whose_squares_fp32_cannot_hold(name, scale):
    """No model makes such numbers, and they come back as well as any."""
    x = block(1, 2, 9, 64).clamp(-3, 3)
    result = round_trip(name, x * scale) / scale
    assert torch.isfinite(result).all()
    error, usual = ((y - x).norm() for y in (result, round_trip(name, x)))
    assert error <= usual * 1.2


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
