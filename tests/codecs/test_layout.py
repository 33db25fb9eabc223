"""How bytes are laid out: counted exactly, packed without gaps, each token and row independent of its neighbours."""

import itertools

import pytest
import torch

from kvplug.codecs import SCHEMES, Float8, GroupWise, PerChannel, PerToken, Rotated, get_codec
from kvplug.codecs.base import from_planes
from kvplug.codecs.packing import code_fields, pack, unpack
from tests import codec_twins as twins
from tests.codecs.cases import CODECS, DTYPES, LOW_BIT, ROTATED, TOKENWISE, block, fits, round_trip

# Bytes of 128 tokens of one head of width 64: codes, and scales, zero points and offsets of 16 bits.
BYTES_AT_64 = {
    "fp8": (Float8(), 128 * (64 + 2)),
    "fp8_e5m2": (Float8("e5m2"), 128 * (64 + 2)),
    "token8": (PerToken(8), 128 * (64 + 4)),
    "token3": (PerToken(3), 128 * (24 + 4)),
    "rotated4": (Rotated(4), 128 * (32 + 2) + 2 * 128),
    "rotated3": (Rotated(3), 128 * (24 + 2) + 2 * 128),
    "rotated2": (Rotated(2), 128 * (16 + 2) + 2 * 128),
    "rotated2_tokenwise": (Rotated(2, None), 128 * (16 + 2)),
    "channel4": (PerChannel(4), 128 * 32 + 2 * 2 * 128),
    "channel2_groups_of_32": (PerChannel(2, 32), 128 * 16 + 4 * 2 * 128),
    "group4": (GroupWise(4), 128 * (32 + 2 * 4)),
}


@pytest.mark.parametrize(("codec", "expected"), BYTES_AT_64.values(), ids=BYTES_AT_64)
def test_bytes_of_a_head(codec, expected):
    assert codec.nbytes(128, 1, 64) == expected
    assert codec.nbytes(256, 3, 64) == 6 * expected
    assert codec.nbytes(0, 3, 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 7, 10])
@pytest.mark.parametrize("dim", [1, 5, 8, 12, 65, 80, 100, 128])
@pytest.mark.parametrize("name", CODECS)
def test_nbytes_counts_what_encoding_makes(name, dim, tokens, dtype):
    if not fits(name, dim):
        with pytest.raises(ValueError, match=f"group_size=4 doesn't divide head_dim={dim}; use one of 1"):
            CODECS[name].encode(block(3, 2, tokens, dim))
        return
    codec = CODECS[name]
    encoded = codec.encode(block(3, 2, tokens, dim, dtype=dtype))
    held = sum(t.untyped_storage().nbytes() for t in encoded.tensors())
    planned = codec.nbytes(tokens, 2, dim, dtype) if name == "dense" else codec.nbytes(tokens, 2, dim)
    assert held == 3 * planned
    assert encoded.tokens == tokens
    for field in codec.fields(dim, dtype):
        tensor = encoded.fields[field.name]
        assert tensor.shape == (3, 2, -(-tokens // field.every), field.width)
        assert tensor.dtype == field.dtype
    assert [field.name for field in codec.fields(dim, dtype)] == list(encoded.fields)
    assert codec.decode(encoded, dtype).shape == (3, 2, tokens, dim)
    on_shapes = codec.encode(torch.empty(3, 2, tokens, dim, dtype=dtype, device="meta"))
    for ours, theirs in zip(on_shapes.tensors(), encoded.tensors(), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype


def test_packing_in_halves():
    """The low bits of byte i hold channel i, its high bits channel i + half."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.uint8)
    assert pack(codes, 4)["codes"].tolist() == [[1 | 4 << 4, 2 | 5 << 4, 3 | 6 << 4]]
    assert pack(codes[:, :5], 4)["codes"].tolist() == [[1 | 4 << 4, 2 | 5 << 4, 3]]


def test_packing_in_quarters():
    """Byte i holds channels i, i + q, i + 2q and i + 3q from its lowest bits up."""
    codes = torch.tensor([[1, 2, 3, 0, 2, 3, 1, 1]], dtype=torch.uint8)
    assert pack(codes, 2)["codes"].tolist() == [[1 | 3 << 2 | 2 << 4 | 1 << 6, 2 | 0 << 2 | 3 << 4 | 1 << 6]]
    assert pack(codes[:, :5], 2)["codes"].tolist() == [[1 | 3 << 2 | 2 << 4, 2 | 0 << 2]]


def test_packing_of_three_bits():
    """The upper two in quarters; the lowest of the first and of the second half of each quarter in bits 0, 2, 4, 6 and
    1, 3, 5, 7."""
    codes = torch.tensor([[3, 4, 7, 0, 5, 6, 3, 2, 1]], dtype=torch.uint8)
    packed = pack(codes, 3)
    assert packed["codes"].tolist() == pack(codes >> 1, 2)["codes"].tolist()
    # Quarters of three: channels 0, 1 and 2, 3 4 5, 6 7 8; halves of two and one.
    low = [1 << 0 | 1 << 1 | 0 << 2 | 0 << 3 | 1 << 4 | 1 << 5, 0 << 0 | 1 << 2 | 0 << 4]
    assert packed["low"].tolist() == [low]


@pytest.mark.parametrize("dim", [*range(20), 24, 32, 40, 48, 64, 80, 96, 100, 128, 192, 256])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unpacking_is_exact(bits, dim):
    generator = torch.Generator().manual_seed(dim)
    codes = torch.randint(0, 2**bits, (2, 3, 50, dim), dtype=torch.uint8, generator=generator)
    packed = pack(codes, bits)
    for field in code_fields(dim, bits):
        assert packed[field.name].shape == (2, 3, 50, field.width)
    assert sum(field.width for field in code_fields(dim, bits)) >= dim * bits / 8
    assert torch.equal(unpack(packed, bits, dim), codes)
    if dim:
        assert torch.equal(twins.unpacked(packed, bits, dim), codes.long())
    if dim % 8 == 0:
        assert sum(field.width for field in code_fields(dim, bits)) == dim * bits // 8, "a bit is wasted"


@pytest.mark.parametrize("dim", [5, 8, 64, 80])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_unpacking_a_piece_of_a_buffer(bits, dim):
    """Stores hand out views that start at any token."""
    codes = torch.randint(0, 2**bits, (2, 3, 9, dim), dtype=torch.uint8)
    parts = {name: tensor[:, 1:, 3:8] for name, tensor in pack(codes, bits).items()}
    assert torch.equal(unpack(parts, bits, dim), codes[:, 1:, 3:8])


@pytest.mark.parametrize("bits", [2, 4])
def test_every_byte_survives(bits):
    parts = 8 // bits
    codes = torch.tensor(list(itertools.product(range(2**bits), repeat=parts)), dtype=torch.uint8)
    packed = pack(codes, bits)["codes"]
    assert sorted(packed.flatten().tolist()) == list(range(256))
    assert torch.equal(unpack({"codes": packed}, bits, parts), codes)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_every_number_of_fp8_is_read_back(kind):
    """All that the eight bits can hold, subnormals and both zeros; infinities and NaN are never written."""
    codec, bits = Float8(kind), torch.arange(256, dtype=torch.uint8)
    expected = bits.view(twins.FP8[kind][0]).float()
    bits, expected = bits[expected.isfinite()], expected[expected.isfinite()]
    assert len(bits) == {"e4m3": 254, "e5m2": 248}[kind]
    encoded = codec.encode(torch.zeros(1, 1, 1, len(bits)))
    encoded.fields["codes"].copy_(bits)
    encoded.fields["scale"].fill_(1.0)
    assert torch.equal(codec.decode(encoded, torch.float32)[0, 0, 0], expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_every_integer_is_read_back(bits):
    codec, codes = PerToken(bits), torch.arange(2**bits, dtype=torch.uint8)
    encoded = codec.encode(torch.zeros(1, 1, 1, 2**bits))
    for name, tensor in pack(codes, bits).items():
        encoded.fields[name].copy_(tensor)
    encoded.fields["scale"].fill_(1.0)
    assert torch.equal(codec.decode(encoded, torch.float32)[0, 0, 0], codes.float())


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("codebook", ["uniform", "lloyd_max"])
def test_every_level_is_read_back(codebook, bits):
    codec, codes = Rotated(bits, None, codebook), torch.arange(2**bits, dtype=torch.uint8)
    encoded = codec.encode(torch.zeros(1, 1, 1, 2**bits))
    for name, tensor in pack(codes, bits).items():
        encoded.fields[name].copy_(tensor)
    encoded.fields["scale"].fill_(1.0)
    factors = codec.factors(encoded)
    read = from_planes(codec.codes(encoded), 2**bits) * factors.scale + (0 if factors.zero is None else factors.zero)
    assert torch.equal(read[0, 0, 0].double(), twins.levels(bits, codebook))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_a_row_of_a_batch_is_the_row_alone(name, dtype):
    x = block(4, 2, 9, 64, dtype=dtype, spread=2.0)
    x[2] *= 1000  # a loud row must not change its neighbours
    whole = round_trip(name, x)
    for row in range(4):
        assert torch.equal(whole[row], round_trip(name, x[row : row + 1])[0])


@pytest.mark.parametrize("name", CODECS)
def test_groups_are_independent(name):
    """One group at a time (of one token where tokens are independent) or all at once makes the same bytes."""
    codec = CODECS[name]
    x = block(1, 2, 12, 64, spread=2.0)
    whole = codec.encode(x)
    for start in range(0, 12, codec.granule):
        alone = codec.encode(x[:, :, start : start + codec.granule])
        part = whole.narrow(start, alone.tokens)
        for field, tensor in alone.fields.items():
            assert torch.equal(part.fields[field], tensor)


@pytest.mark.parametrize("name", CODECS)
def test_tokenwise(name):
    """The codec for stores where tokens come and go: granule 1, no wider codes, and itself once it is."""
    codec = CODECS[name]
    single = codec.tokenwise()
    assert single.granule == 1
    assert single.tokenwise() is single
    assert (single is codec) == (name in TOKENWISE)
    codes = [sum(f.width for f in c.fields(64, torch.float32) if f.kind == "codes") for c in (codec, single)]
    assert codes[0] == codes[1]


@pytest.mark.parametrize("name", CODECS)
def test_narrowing_shares_the_bytes(name):
    codec = CODECS[name]
    encoded = codec.encode(block(2, 2, 13, 64))
    start, length = (3, 4) if codec.granule == 1 else (codec.granule, 8)
    part = encoded.narrow(start, length)
    whole = codec.decode(encoded, torch.float32)
    assert torch.equal(part.decode(torch.float32), whole[:, :, start : start + length])
    for ours, theirs in zip(part.tensors(), encoded.tensors(), strict=True):
        assert ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", CODECS)
def test_no_tokens(name):
    encoded = CODECS[name].encode(torch.zeros(2, 3, 0, 16))
    assert encoded.tokens == 0
    assert CODECS[name].decode(encoded, torch.float32).shape == (2, 3, 0, 16)


@pytest.mark.parametrize("name", CODECS)
def test_a_strided_input_is_left_as_it_was(name):
    """Keys come transposed from the model's projection."""
    x = block(2, 9, 3, 64)
    before = x.clone()
    assert torch.equal(round_trip(name, x.transpose(1, 2)), round_trip(name, x.transpose(1, 2).contiguous()))
    assert torch.equal(x, before), "encoding must not write into what it was given"


@pytest.mark.parametrize("name", LOW_BIT)
def test_reading_leaves_what_is_stored(name):
    encoded = CODECS[name].encode(block(2, 2, 9, 64))
    before = {field: tensor.clone() for field, tensor in encoded.fields.items()}
    encoded.codes(), encoded.factors()
    for field, tensor in encoded.fields.items():
        assert torch.equal(tensor, before[field])


@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("dim", [1, 2, 3, 16, 24, 80, 100, 128])
def test_a_rotation_is_undone_and_keeps_lengths(name, dim):
    codec, x = CODECS[name], block(2, 2, 5, dim)
    rotated = codec.rotate(x)
    # dim products of fp32 numbers of size 3, twice.
    assert torch.allclose(codec.unrotate(rotated), x, atol=dim * 2**-21, rtol=0)
    assert torch.allclose(rotated.double(), x.double() @ twins.rotation(dim), atol=dim * 2**-21, rtol=0)


@pytest.mark.parametrize("dim", [16, 64, 80])
def test_rotated_constants_are_flat(dim):
    rotated = Rotated(4).rotate(torch.ones(1, 1, 1, dim))
    assert torch.allclose(rotated.abs(), torch.ones(()), atol=1e-6)


REFUSED = {
    "bits of Rotated": (lambda: Rotated(8), "bits=8 is not accepted; use one of 2, 3, 4"),
    "bits of PerToken": (lambda: PerToken(5), "bits=5 is not accepted; use one of 2, 3, 4, 8"),
    "bits of PerChannel": (lambda: PerChannel(1), "bits=1 is not accepted"),
    "bits of GroupWise": (lambda: GroupWise(16), "bits=16 is not accepted"),
    "group of Rotated": (lambda: Rotated(4, 0), "group_size=0 is not accepted; use a whole number from 1, or None"),
    "group of PerChannel": (lambda: PerChannel(4, None), "group_size=None is not accepted; use a whole number from 1"),
    "group of GroupWise": (lambda: GroupWise(4, -2), "group_size=-2 is not accepted"),
    "codebook": (lambda: Rotated(4, codebook="nf4"), "codebook='nf4' is not accepted; use one of uniform, lloyd_max"),
    "format": (lambda: Float8("e3m4"), "format='e3m4' is not accepted; use one of e4m3, e5m2"),
    "group and width": (
        lambda: GroupWise(4, 64).check(96),
        "group_size=64 doesn't divide head_dim=96; use one of 1, 2, 3",
    ),
    "name": (lambda: get_codec("int5", "keys"), "keys='int5' is not a known dtype; use one of dense"),
    "name with a scheme": (lambda: get_codec("int5", scheme="token"), "codec='int5' is not a known dtype"),
    "scheme": (lambda: get_codec("int4", scheme="kivi"), "scheme='kivi' is not known; use one of rotated, lloyd_max"),
    "scheme of a float": (
        lambda: get_codec("fp8", "keys", scheme="token"),
        "scheme='token' is for integers, and keys='fp8'",
    ),
    "group of none": (lambda: get_codec(None, group_size=64), "group_size=64 is for integers, and codec=None is none"),
    "group of tokens": (lambda: get_codec("int8", group_size=64), "group_size=64 is not for scheme='token'"),
    "bits by name": (
        lambda: get_codec("int8", scheme="rotated"),
        "scheme='rotated' is for 4 bits and fewer, and codec='int8'; use",
    ),
    "number": (lambda: get_codec(8, "dtype"), "dtype=8 is not a known dtype; use one of dense"),
    "list": (lambda: get_codec(["int4"], "keys", scheme="token"), "keys=['int4'] is not a known dtype"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


SIDES = {
    "rotated": (lambda b, g=64: Rotated(b, g, unbiased=True), lambda b, g=None: Rotated(b, None)),
    "lloyd_max": (
        lambda b, g=64: Rotated(b, g, "lloyd_max", unbiased=True),
        lambda b, g=None: Rotated(b, None, "lloyd_max"),
    ),
    "channel": (PerChannel, lambda b, g=None: PerToken(b)),
    "token": (PerToken, PerToken),
    "group": (GroupWise, GroupWise),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["int4", "int3", "int2"])
def test_codecs_by_scheme(name, scheme):
    bits = int(name[3:])
    for side, kind in zip(("keys", "values"), SIDES[scheme], strict=True):
        assert get_codec(name, side=side, scheme=scheme) == kind(bits)
        if scheme != "token":
            assert get_codec(name, side=side, scheme=scheme, group_size=16) == kind(bits, 16)
        if scheme == "rotated":
            assert get_codec(name, side=side) == kind(bits)


def test_codecs_by_group_size():
    assert get_codec("int3", group_size=32) == Rotated(3, 32, unbiased=True)
    assert get_codec("int8", scheme="channel", group_size=32) == PerChannel(8, 32)
    assert get_codec("int8", scheme="token") == PerToken(8)
    assert get_codec("int8", side="values") == PerToken(8)
    assert get_codec(PerChannel(2)) == PerChannel(2)
