"""How bytes are laid out: counted exactly, packed in halves, each token and row independent of its neighbours."""

import pytest
import torch

from kvplug.codecs import CODECS
from kvplug.codecs.integer import pack_halves, unpack_halves
from tests.codecs.test_round_trip import DTYPES, block, round_trip

# Bytes of one token of one head of width 64: codes, and 16-bit scale and zero point.
BYTES_AT_64 = {"fp8": 64 + 2, "int8": 64 + 2 + 2, "int4": 32 + 2 + 2}


@pytest.mark.parametrize("name", BYTES_AT_64)
def test_bytes_of_a_token(name):
    assert CODECS[name].nbytes(1, 1, 64) == BYTES_AT_64[name]
    assert CODECS[name].nbytes(10, 3, 64) == 30 * BYTES_AT_64[name]
    assert CODECS[name].nbytes(0, 3, 64) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 8, 16, 65, 80, 100, 128])
@pytest.mark.parametrize("name", CODECS)
def test_nbytes_counts_what_encoding_makes(name, dim, dtype):
    codec = CODECS[name]
    encoded = codec.encode(block(3, 2, 7, dim, dtype=dtype))
    held = sum(t.untyped_storage().nbytes() for t in encoded.tensors())
    planned = codec.nbytes(7, 2, dim, dtype) if name == "dense" else codec.nbytes(7, 2, dim)
    assert held == 3 * planned
    assert encoded.tokens == 7
    for tensor in encoded.tensors():
        assert tensor.shape[:3] == (3, 2, 7)
    assert codec.decode(encoded, dtype).shape == (3, 2, 7, dim)


def test_packing_in_halves():
    """The low bits of byte i hold channel i, its high bits channel i + half."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6]], dtype=torch.uint8)
    assert pack_halves(codes).tolist() == [[1 | 4 << 4, 2 | 5 << 4, 3 | 6 << 4]]
    odd = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.uint8)
    assert pack_halves(odd).tolist() == [[1 | 4 << 4, 2 | 5 << 4, 3]]


@pytest.mark.parametrize("dim", range(1, 20))
def test_unpacking_is_exact(dim):
    codes = torch.randint(0, 16, (2, 3, 50, dim), dtype=torch.uint8)
    packed = pack_halves(codes)
    assert packed.shape == (2, 3, 50, (dim + 1) // 2)
    assert torch.equal(unpack_halves(packed, dim), codes)


def test_every_pair_of_codes_survives():
    low, high = torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij")
    codes = torch.stack([low.flatten(), high.flatten()], dim=-1).to(torch.uint8)
    assert torch.equal(unpack_halves(pack_halves(codes), 2), codes)


@pytest.mark.parametrize("name", CODECS)
def test_every_code_of_a_byte_is_read_back(name):
    """Every value that eight bits of e4m3 can hold, and each of the integer codes, decodes to what it stands for."""
    codec = CODECS[name]
    if name == "fp8":
        bits = torch.tensor([b for b in range(256) if b & 127 != 127], dtype=torch.uint8)
        expected = bits.view(torch.float8_e4m3fn).float()
        bits, expected = bits.reshape(1, 1, 2, 127), expected.reshape(1, 1, 2, 127)
    elif name == "int8":
        bits = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 2, 128)
        expected = bits.float()
    else:
        return
    encoded = codec.encode(torch.zeros_like(expected))
    encoded.fields["codes"].copy_(bits)
    encoded.fields["scale"].fill_(1.0)
    assert torch.equal(codec.decode(encoded, torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_a_row_of_a_batch_is_the_row_alone(name, dtype):
    x = block(4, 2, 9, 64, dtype=dtype, spread=2.0)
    x[2] *= 1000  # a loud row must not change its neighbours
    whole = round_trip(name, x)
    for row in range(4):
        assert torch.equal(whole[row], round_trip(name, x[row : row + 1])[0])


@pytest.mark.parametrize("name", CODECS)
def test_tokens_are_independent(name):
    """Granule 1: one by one or at once makes the same bytes, and a token's bytes don't depend on its neighbours."""
    codec = CODECS[name]
    assert codec.granule == 1
    x = block(1, 2, 9, 64, spread=2.0)
    whole = codec.encode(x)
    for token in range(9):
        alone = codec.encode(x[:, :, token : token + 1])
        for field, tensor in alone.fields.items():
            assert torch.equal(whole.fields[field][:, :, token : token + 1], tensor)


@pytest.mark.parametrize("name", CODECS)
def test_narrowing_shares_the_bytes(name):
    encoded = CODECS[name].encode(block(2, 2, 9, 64))
    part = encoded.narrow(3, 4)
    whole = CODECS[name].decode(encoded, torch.float32)
    assert torch.equal(part.decode(torch.float32), whole[:, :, 3:7])
    for ours, theirs in zip(part.tensors(), encoded.tensors(), strict=True):
        assert ours.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", CODECS)
def test_no_tokens(name):
    encoded = CODECS[name].encode(torch.zeros(2, 3, 0, 16))
    assert encoded.tokens == 0
    assert CODECS[name].decode(encoded, torch.float32).shape == (2, 3, 0, 16)


@pytest.mark.parametrize("name", CODECS)
def test_a_strided_input_and_an_input_that_requires_grad(name):
    """Keys come transposed from the model's projection."""
    x = block(2, 9, 3, 64)
    assert torch.equal(round_trip(name, x.transpose(1, 2)), round_trip(name, x.transpose(1, 2).contiguous()))
    before = x.clone()
    round_trip(name, x)
    assert torch.equal(x, before), "encoding must not write into what it was given"


@pytest.mark.parametrize("dim", [1, 2, 3, 16, 24, 80, 100, 128])
def test_a_rotation_is_undone_and_keeps_lengths(dim):
    codec, x = CODECS["int4"], block(2, 2, 5, dim)
    rotated = codec.rotate(x)
    # dim products of fp32 numbers of size 3, twice.
    assert torch.allclose(codec.unrotate(rotated), x, atol=dim * 2**-21, rtol=0)
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)
