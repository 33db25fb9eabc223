"""Attention over what layers hold together, on every path, against loops over what each of them gets back."""

import pytest
import torch

from kvplug import kernels
from kvplug.codecs import PerToken, Plain, Rotated, get_codec
from kvplug.codecs.joint import LowRank, Merged, part_of
from kvplug.kernels import blocks, dense, reference
from kvplug.view import KVView, Segment
from tests.joint_oracles import orthonormal
from tests.kernels.test_twins import MASKS, TOLERANCE, by_loops, mask_of

LAYERS, BATCH, HEADS, DIM = 2, 2, 2, 16


def low_rank(inner, rank, seed=1):
    return LowRank(inner, orthonormal(LAYERS * HEADS, rank, DIM, seed), LAYERS)


# Keys and values of the encoded part, and how many tokens it has: groups of which the last is cut, too.
SIDES = {
    "merged": (Merged(Plain(), 8, 2), Merged(Plain(), 8, 1), 53),
    "merged_int8": (Merged(PerToken(8), 16, 3), Merged(PerToken(8), 16, 3), 48),
    "merged_rotated": (Merged(Rotated(4, None), 8, 2), Merged(Rotated(3, None), 8, 2), 61),
    "one_token": (Merged(Plain(), 8, 2), Merged(Plain(), 8, 2), 1),
    "values_low_rank": (PerToken(8), low_rank(Plain(), 24), 37),
    "low_rank": (low_rank(Plain(), 40), low_rank(PerToken(8), 24, seed=2), 37),
    "low_rank_int4": (low_rank(Rotated(4, 8), 32), low_rank(Rotated(4, None), 24, seed=2), 150),
}


def case(name, mask, queries, group, member, seed=0, softcap=None):
    *codecs, tokens = SIDES[name]
    generator = torch.Generator().manual_seed(seed)

    def draw(heads, count):
        return torch.randn(BATCH, heads, count, DIM, generator=generator) * 2 + 0.3

    sides = [part_of(codec.encode(draw(LAYERS * HEADS, tokens)), member, LAYERS) for codec in codecs]
    plain = [get_codec("dense").encode(draw(HEADS, 5)) for _ in range(2)]
    view = KVView([Segment(*sides), Segment(*plain)], seen=tokens + 5, queries=queries, dtype=torch.float32)
    query = torch.randn(BATCH, HEADS * group, queries, DIM, generator=generator)
    return query, view, mask_of(mask, view, BATCH, HEADS * group, HEADS, queries, seed), 0.2, softcap, None


@pytest.mark.parametrize("name", SIDES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "group"), [(1, 1), (1, 4), (5, 2), (70, 2)])
@pytest.mark.parametrize("member", [0, 1])
def test_every_path_against_loops(monkeypatch, name, mask, queries, group, member):
    arguments = case(name, mask, queries, group, member, seed=queries)
    expected = by_loops(*arguments)
    assert torch.allclose(reference.attend(*arguments)[0], expected, atol=TOLERANCE, rtol=0)
    assert torch.allclose(kernels.attend(*arguments), expected, atol=TOLERANCE, rtol=0)
    assert torch.allclose(dense.attend(*arguments[:4]), expected, atol=TOLERANCE, rtol=0)
    assert torch.allclose(blocks.attend(*arguments), expected, atol=TOLERANCE, rtol=0)
    # Blocks of seven tokens, so that groups lie across them.
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", BATCH * HEADS * DIM * 7)
    assert torch.allclose(blocks.attend(*arguments), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", SIDES)
def test_capped_scores(name):
    arguments = case(name, "bool", 3, 2, 1, softcap=3.0)
    assert torch.allclose(blocks.attend(*arguments), by_loops(*arguments), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["merged", "low_rank"])
def test_the_layers_read_different_things(name):
    """Or the tests above could not tell which layer's part was read."""
    outs = [by_loops(*case(name, "none", 1, 2, member)) for member in (0, 1)]
    assert (outs[0] - outs[1]).abs().max() > 0.1
