"""What several layers get back of what they are written in together, against its description in double precision."""

import pytest
import torch

from kvplug.codecs import PerChannel, PerToken, Plain, Rotated
from kvplug.codecs.joint import LowRank, Merged, part_of
from tests.codecs.cases import CODECS, DTYPES, ROUNDING, assert_within, block
from tests.joint_oracles import MergedTwin, ProjectedTwin, orthonormal

# A length is rounded to bfloat16, and halfway between two of them fp32 may choose the other one.
HALFWAY = 2**-7


def pair(kind, tokens=37, heads=3, dim=16, rows=2, seed=0):
    """Two layers, heads side by side, `[rows, 2 * heads, tokens, dim]`."""
    one, other = (block(rows, heads, tokens, dim, seed=seed + i) for i in (0, 1))
    mean = block(rows, heads, 1, dim, spread=4.0, seed=seed + 2)
    found = {
        "unlike": (one, other),
        "nearly_alike": (one + mean, one + mean + other / 10),
        "identical": (one, one),
        "opposite": (one, -one),
        "one_is_zero": (one, torch.zeros_like(one)),
        "both_are_zero": (torch.zeros_like(one), torch.zeros_like(one)),
        "one_is_loud": (one * 1000, other),
        "constant_channels": (one + mean * 100, other - mean * 100),
        "tiny": (one * 1e-6, other * 1e-6),
        "huge": (one * 1e4, other * 1e4),
    }[kind]
    return torch.cat(found, dim=1)


KINDS = [
    "unlike", "nearly_alike", "identical", "opposite", "one_is_zero", "both_are_zero", "one_is_loud",
    "constant_channels", "tiny", "huge",
]  # fmt: skip


def twin_of(twin, x):
    return torch.stack([twin(row) for row in x])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("group", "distinct"), [(8, 1), (8, 2), (5, 5), (1, 1), (64, 3)])
def test_merged_layers_against_the_twin(kind, group, distinct):
    x = pair(kind)
    codec = Merged(Plain(), group, distinct)
    result = codec.decode(codec.encode(x), x.dtype)
    expected = twin_of(MergedTwin(group, distinct), x)
    # The difference that a distinct token keeps makes up for all that is left out, so only the others are roundings of
    # a length apart. Which tokens are the worst ones may be a close call: then the errors are alike.
    error, other = (result - x).norm(dim=-1), (expected - x).norm(dim=-1)
    size = x.norm(dim=-1).maximum((x - x.mean(2, keepdim=True)).norm(dim=-1)) + 1e-30
    if distinct == group:
        assert torch.allclose(result, x, atol=float(x.abs().max()) * 2**-20, rtol=2**-20)
    assert torch.isfinite(result).all()
    sums = [e.square().sum((1, 2)) for e in (error, other)]
    assert torch.allclose(*sums, rtol=0.02, atol=float(size.square().sum() * 2**-18))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_merged_layers(dtype):
    """Where no two tokens are equally bad and no direction is a close call, element by element."""
    x = pair("nearly_alike").to(dtype)
    codec = Merged(Plain(), 8, 2)
    result, expected = codec.decode(codec.encode(x), dtype), twin_of(MergedTwin(8, 2), x)
    assert result.dtype == dtype
    largest = expected.float().abs().amax()
    assert (result.float() - expected.float()).abs().max() <= largest * (HALFWAY + 4 * ROUNDING[dtype])
    assert (result.float() - expected.float()).abs().mean() <= largest * (2**-12 + ROUNDING[dtype])


@pytest.mark.parametrize("inner", [PerToken(8), PerToken(4), Rotated(4, None)], ids=lambda codec: codec.name)
def test_a_direction_in_few_bits(inner):
    """Of a vector's part along the direction that is read, a length of least squares misses nothing; what is left is
    the angle between it and the vector. So the error is that to the codec's own direction, whatever its length."""
    x = pair("nearly_alike", tokens=40)
    codec = Merged(inner, 8, 1)
    encoded = codec.encode(x)
    fields = {k.removeprefix("direction."): f for k, f in encoded.fields.items() if k.startswith("direction.")}
    direction = inner.decode(type(encoded)(inner, fields, 16), torch.float64).repeat(1, 2, 1, 1)
    mean = torch.cat([g.mean(2, keepdim=True).bfloat16().double().expand_as(g) for g in x.split(8, dim=2)], dim=2)
    y = x.double() - mean
    along = (y * direction).sum(-1, keepdim=True) / direction.square().sum(-1, keepdim=True) * direction
    error = (codec.decode(encoded, torch.float64) - x).norm(dim=-1)
    assert (error <= (y - along).norm(dim=-1) + 2**-8 * along.norm(dim=-1) + 1e-5).all()
    assert (error < 1e-4).sum() >= 40 // 8 * 6 * 2, "one token of each group and head comes back"


def test_parts_are_the_whole_s():
    x = pair("nearly_alike")
    for codec in (Merged(PerToken(8), 8, 2), LowRank(PerToken(8), orthonormal(6, 40, 16), 2)):
        encoded = codec.encode(x)
        whole = codec.decode(encoded, x.dtype)
        for member, expected in enumerate(whole.chunk(2, dim=1)):
            part = part_of(encoded, member, 2)
            assert torch.equal(part.codec.decode(part, x.dtype), expected)
    encoded = PerToken(8).encode(x)
    parts = [part_of(encoded, member, 2).decode(x.dtype) for member in (0, 1)]
    assert torch.equal(torch.cat(parts, dim=1), encoded.decode(x.dtype))


@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("rank", [1, 20, 96])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_coordinates_against_the_twin(dtype, rank, members):
    basis, x = orthonormal(6, rank, 16, seed=rank), block(2, 6, 11, 16, dtype=dtype, spread=3.0)
    codec = LowRank(Plain(), basis, members)
    encoded = codec.encode(x)
    assert encoded.fields["codes"].shape == (2, 1, 11, rank)
    result, expected = codec.decode(encoded, dtype).double(), twin_of(ProjectedTwin(basis), x.double())
    largest = x.double().flatten(-1).norm(dim=-1).amax() * 6**0.5
    assert (result - expected).abs().max() <= largest * ROUNDING[dtype] * 4
    if rank == 96:
        assert (result - x.double()).abs().max() <= largest * ROUNDING[dtype] * 4


@pytest.mark.parametrize("name", ["token8", "token4", "rotated4", "channel4_groups_of_5"])
def test_coordinates_in_few_bits_are_off_by_what_the_codec_is(name):
    basis, x = orthonormal(4, 32, 16, seed=3), block(2, 4, 25, 16, spread=3.0)
    codec = LowRank(CODECS[name], basis, 2)
    coordinates = torch.einsum("bhtd,hrd->btr", x, basis)[:, None]
    # Expanded and taken to the basis again nothing changes, since its directions are orthonormal.
    again = torch.einsum("bhtd,hrd->btr", codec.decode(codec.encode(x), x.dtype), basis)[:, None]
    assert_within(name, coordinates, again)
    assert (again - coordinates).abs().max() > 0


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fields_are_of_the_shapes_that_are_told(dtype, tokens):
    x = block(2, 6, tokens, 16, dtype=dtype)
    codecs = [Merged(i, 8, 2) for i in (Plain(), PerToken(8), Rotated(4, None))]
    codecs += [LowRank(i, orthonormal(6, 40, 16), 3) for i in (Plain(), PerToken(4), PerChannel(4, 8))]
    for codec in codecs:
        encoded = codec.encode(x)
        told = {f.name: f for f in codec.fields(16, dtype)}
        assert encoded.fields.keys() == told.keys()
        for name, found in encoded.fields.items():
            field = told[name]
            assert found.dtype == field.dtype, name
            assert found.shape == (2, 6 // field.share, -(-tokens // field.every), field.width), name


WRONG = {
    "group_0": (lambda: Merged(Plain(), 0), "group_size=0"),
    "group_257": (lambda: Merged(Plain(), 257), "group_size=257.*256"),
    "group_true": (lambda: Merged(Plain(), True), "group_size=True"),
    "distinct_0": (lambda: Merged(Plain(), 8, 0), "distinct=0.*8"),
    "distinct_9": (lambda: Merged(Plain(), 8, 9), "distinct=9.*8"),
    "distinct_true": (lambda: Merged(Plain(), 8, True), "distinct=True"),
    "inner": (lambda: Merged(PerChannel(4, 8)), "inner=PerChannel.*groups"),
    "basis": (lambda: LowRank(Plain(), orthonormal(2, 8, 16), 2).check(12), "width 16, and these have 12"),
}


@pytest.mark.parametrize(("make", "told"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(make, told):
    with pytest.raises(ValueError, match=told):
        make()
