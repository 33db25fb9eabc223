"""Every path of attention against the reference, and the reference against loops over single queries and heads."""

import math

import pytest
import torch

from kvplug import kernels
from kvplug.codecs import GroupWise, PerChannel, PerToken, Rotated, get_codec
from kvplug.kernels import blocks, dense, reference
from kvplug.view import KVView, Segment

# fp32 sums of some hundred products of numbers of size 3 in another order; scores of size 50 move a weight by 2**-16.
TOLERANCE = 5e-5
PARTS = {
    "one_dense": [("dense", "dense", 37)],
    "int8_and_new": [("int8", "int8", 40), ("dense", "dense", 5)],
    "int4_and_new": [("int4", "int4", 33), ("dense", "dense", 1)],
    "fp8_and_new": [("fp8", "fp8", 300), ("dense", "dense", 3)],
    "mixed": [("dense", "int8", 4), ("int8", "int4", 50), ("dense", "dense", 2)],
    # Groups of tokens of which the last is short, and some that need several blocks.
    "int4_in_groups": [("int4", "int4", 150), ("dense", "dense", 5)],
    "int3_and_int2": [(Rotated(3, 8), Rotated(2, 8), 50), ("dense", "dense", 1)],
    "int2_by_token": [(Rotated(2, None), Rotated(3, None), 37)],
    "channel_and_token": [(PerChannel(4, 16), PerToken(4), 50), ("dense", "dense", 3)],
    "channel_and_rotated": [(PerChannel(2, 16), Rotated(4, 8), 48), ("dense", "dense", 3)],
    "lloyd_max": [(Rotated(4, 8, "lloyd_max"), Rotated(3, None, "lloyd_max"), 50), ("dense", "dense", 3)],
    "group_and_fp8_e5m2": [(GroupWise(4, 4), "fp8_e5m2", 37), ("fp8_e5m2", GroupWise(3, 4), 9)],
}
MASKS = ["none", "bool", "additive", "bool_by_head", "additive_by_kv_head"]


def view_of(parts, batch=2, kv_heads=2, width=16, value_width=16, seed=0, queries=1):
    generator = torch.Generator().manual_seed(seed)

    def draw(tokens, dim):
        return torch.randn(batch, kv_heads, tokens, dim, generator=generator) * 2 + 0.3

    segments = [
        Segment(
            get_codec(keys).encode(draw(tokens, width)),
            get_codec(values, side="values").encode(draw(tokens, value_width)),
        )
        for keys, values, tokens in parts
    ]
    tokens = sum(part[2] for part in parts)
    return KVView(segments, seen=tokens, queries=queries, dtype=torch.float32)


def mask_of(kind, view, batch, heads, kv_heads, queries, seed=0):
    """Aligned with the slots; every query sees at least one of them."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    width = {"bool": 1, "additive": 1, "bool_by_head": heads, "additive_by_kv_head": kv_heads}[kind]
    visible = torch.rand(batch, width, queries, view.tokens, generator=generator) < 0.6
    visible[..., -1] = True
    if kind.startswith("bool"):
        return visible
    return torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min)


def by_loops(query, view, mask, scale, softcap=None, sinks=None):
    """One query of one head at a time, in float64."""
    keys = torch.cat([s.keys.codec.decode(s.keys, torch.float32) for s in view.segments], 2).double()
    values = torch.cat([s.values.codec.decode(s.values, torch.float32) for s in view.segments], 2).double()
    batch, heads, queries, _ = query.shape
    group = heads // keys.shape[1]
    out = torch.zeros(batch, heads, queries, values.shape[-1], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            for q in range(queries):
                scores = keys[b, h // group] @ query[b, h, q].double() * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if mask is not None:
                    row = mask[min(b, mask.shape[0] - 1)]
                    row = row[h if row.shape[0] == heads else (h // group if row.shape[0] > 1 else 0), q]
                    hidden = ~row if row.dtype == torch.bool else row < -1e30
                    scores = scores.masked_fill(hidden, -math.inf)
                weights = scores.exp() if sinks is None else scores.sub(0).exp()
                total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
                out[b, h, q] = (weights / total) @ values[b, h // group]
    return out.float()


def case(parts, mask_kind, queries, group, softcap=None, learned=False, **widths):
    batch, kv_heads = 2, 2
    heads = kv_heads * group
    view = view_of(PARTS[parts], batch, kv_heads, queries=queries, **widths)
    query = torch.randn(batch, heads, queries, widths.get("width", 16), generator=torch.Generator().manual_seed(5))
    mask = mask_of(mask_kind, view, batch, heads, kv_heads, queries)
    sinks = torch.linspace(-1, 3, heads) if learned else None
    return query, view, mask, 0.2, softcap, sinks


EXTRAS = {"plain": {}, "softcap": {"softcap": 3.0}, "learned_sinks": {"learned": True}}
grid = [
    pytest.mark.parametrize("parts", PARTS),
    pytest.mark.parametrize("mask", MASKS),
    pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS),
]


def over(marks):
    def apply(function):
        for mark in marks:
            function = mark(function)
        return function

    return apply


@over(grid)
def test_the_reference_against_loops(parts, mask, extra):
    arguments = case(parts, mask, queries=3, group=2, **extra)
    out, weights = reference.attend(*arguments)
    assert torch.allclose(out, by_loops(*arguments), atol=TOLERANCE, rtol=0)
    assert weights.shape == (2, 4, 3, arguments[1].tokens)


@over(grid)
@pytest.mark.parametrize(
    ("queries", "group"), [(1, 1), (1, 4), (5, 2), (70, 2)], ids=["one", "grouped", "five", "many"]
)
def test_blocks_against_the_reference(monkeypatch, parts, mask, extra, queries, group):
    """Blocks of seven tokens, so that each segment needs several and the last is short."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 2 * 2 * 16 * 7)
    arguments = case(parts, mask, queries, group, **extra)
    assert torch.allclose(blocks.attend(*arguments), reference.attend(*arguments)[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("queries", "group"), [(1, 4), (5, 2), (70, 2), (40, 1)])
def test_dense_against_the_reference(parts, mask, queries, group):
    arguments = case(parts, mask, queries, group)
    assert torch.allclose(dense.attend(*arguments[:4]), reference.attend(*arguments)[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("queries", [1, 2, 31, 32, 33, 80])
@over(grid)
def test_the_dispatcher_against_the_reference(parts, mask, extra, queries):
    arguments = case(parts, mask, queries, group=2, **extra)
    assert torch.allclose(kernels.attend(*arguments), reference.attend(*arguments)[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("parts", PARTS)
def test_keys_and_values_of_different_widths(parts, queries):
    """Latent attention: keys of 24 channels, values of 8."""
    arguments = case(parts, "bool", queries, group=2, width=24, value_width=8)
    out = kernels.attend(*arguments)
    assert out.shape == (2, 4, queries, 8)
    assert torch.allclose(out, by_loops(*arguments), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "additive"])
@pytest.mark.parametrize("queries", [1, 40])
def test_a_query_that_sees_nothing_gives_finite_numbers(queries, kind):
    """Queries of padding tokens see nothing; NaN would spread to every token through the next layer."""
    query, view, mask, *rest = case("int8_and_new", kind, queries, group=2)
    hidden = torch.zeros_like(mask) if kind == "bool" else torch.full_like(mask, torch.finfo(torch.float32).min)
    assert kernels.attend(query, view, hidden, *rest).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 40])
def test_half_precision_queries(dtype, queries):
    """The result has the query's dtype and is the reference's up to one rounding to it (2**-8) of numbers of size 6."""
    query, view, *rest = case("int4_and_new", "bool", queries, group=2)
    out = kernels.attend(query.to(dtype), view, *rest)
    assert out.dtype == dtype
    expected = reference.attend(query.to(dtype).float(), view, *rest)[0]
    assert torch.allclose(out.float(), expected, atol=6 * 2**-8 * 2, rtol=0)
