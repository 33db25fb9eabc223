"""Attention over slots that heads share against the reference over the same slots spread out to each head, and what a
watch is shown against the reference's weights.
"""

import pytest
import torch

from kvplug.codecs import CODECS
from kvplug.kernels import blocks, heads, reference
from kvplug.view import KVView, Segment, Watch, part_of

# As in tests/kernels/test_twins.py: fp32 sums in another order.
TOLERANCE = 5e-5
BATCH, KV_HEADS, GROUP, DIM = 2, 2, 2, 16
PAGES, PAGE = 7, 2
MASKS = ["none", "padding", "bool", "additive", "by_head"]
LEAST = torch.finfo(torch.float32).min


def shared_view(codec="dense", queries=1, seed=0, watch=None):
    """`PAGES` pages of two heads, one of them nobody's and some slots empty; and new tokens. Heads hold different
    numbers of tokens, positions are those of real tokens before the new ones."""
    draw = torch.Generator().manual_seed(seed)
    slots, before = PAGES * PAGE, 20

    def random(kv_heads, tokens):
        return torch.randn(BATCH, kv_heads, tokens, DIM, generator=draw) * 2 + 0.3

    owners = torch.tensor([[0, 0, 0, 0, 1, 1, KV_HEADS], [0, 1, 1, 1, 1, 1, KV_HEADS]], dtype=torch.int16)
    positions = torch.stack([torch.randperm(before, generator=draw)[:slots] for _ in range(BATCH)])[:, None].int()
    positions[:, :, -PAGE:] = -2
    positions[0, 0, 7] = positions[1, 0, 1] = positions[1, 0, 11] = -1
    encode = CODECS[codec].tokenwise().encode
    segments = [
        Segment(encode(random(1, slots)), encode(random(1, slots)), positions=positions, owners=owners),
        Segment(*(CODECS["dense"].encode(random(KV_HEADS, queries)) for _ in range(2)), start=before),
    ]
    view = KVView(segments, before + queries, queries, dtype=torch.float32, evicting=True, holes=True, watch=watch)
    query = torch.randn(BATCH, KV_HEADS * GROUP, queries, DIM, generator=draw)
    return query, view


def logical_mask(kind, view, seed=0):
    """Every query sees itself; of "padding" one is a padding token's and sees nothing."""
    if kind == "none":
        return None
    draw = torch.Generator().manual_seed(seed)
    own = torch.arange(view.seen - view.queries, view.seen)
    if kind == "padding":
        mask = torch.ones(BATCH, view.seen, dtype=torch.long)
        mask[0, :5] = 0
        return mask
    width = KV_HEADS * GROUP if kind == "by_head" else 1
    visible = torch.rand(BATCH, width, view.queries, view.seen, generator=draw) < 0.6
    visible &= torch.arange(view.seen) <= own[:, None]
    visible[..., torch.arange(view.queries), own] = True
    if view.queries > 1:
        visible[0, :, 0] = False
    return torch.zeros(visible.shape).masked_fill_(~visible, LEAST) if kind == "additive" else visible


def expected(query, view, mask, **extra):
    spread = view.spread()
    return reference.attend(query, spread, spread.align(mask), 0.2, **extra)


EXTRAS = {"plain": {}, "softcap": {"softcap": 3.0}, "sinks": {"sinks": torch.linspace(-1, 3, KV_HEADS * GROUP)}}
grid = [
    pytest.mark.parametrize("queries", [1, 5]),
    pytest.mark.parametrize("kind", MASKS),
    pytest.mark.parametrize("codec", ["dense", "int8", "int4"]),
]


def over(function):
    for mark in grid:
        function = mark(function)
    return function


def real(query, view, mask):
    """Which queries are those of real tokens: with the others' output nothing is done."""
    aligned = view.align(mask)
    if aligned is None:
        return torch.ones(BATCH, view.queries, dtype=torch.bool)
    own = aligned[:, 0].expand(-1, view.queries, -1)[..., -view.queries :].diagonal(dim1=1, dim2=2)
    return (own if own.dtype == torch.bool else own > -1e30).expand(BATCH, view.queries)


def wanted_weights(weights, query, view, mask, wanted):
    """The weights `[batch, heads, queries, slots]` that a watch is to be shown: without a mask those of the last
    queries, else all, zero but for the last ones of each row that are real."""
    if view.align(mask) is None:
        weights = weights[:, :, -min(wanted or view.queries, view.queries) :]
    else:
        counted = real(query, view, mask)
        if wanted is not None:
            counted = counted.clone()
            for row in counted:
                row[row.nonzero()[:, 0][:-wanted]] = False
        weights = weights * counted[:, None, :, None]
    return weights.unflatten(1, (KV_HEADS, GROUP))


@over
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
def test_shared_slots_answer_as_if_each_head_had_its_own(codec, kind, queries, extra):
    query, view = shared_view(codec, queries)
    mask = logical_mask(kind, view)
    out = heads.attend(query, view, view.align(mask), 0.2, **extra)
    close = (out - expected(query, view, mask, **extra)[0]).abs().amax((1, 3)) < TOLERANCE
    assert close[real(query, view, mask)].all()
    assert out.isfinite().all()


def shown_by(attend, query, view, mask, wanted):
    """What a watch is shown, put together along the queries."""
    parts = []
    view.watch = Watch(wanted, lambda *weights: parts.append(weights))
    attend(query, view, mask)
    return [torch.cat(x, dim=3) for x in zip(*parts, strict=True)]


@over
@pytest.mark.parametrize("wanted", [None, 3])
@pytest.mark.parametrize("block", [1 << 20, 200, 100], ids=["at_once", "by_two", "by_one"])
def test_a_watch_is_shown_the_weights_of_pages_and_of_new_tokens(monkeypatch, codec, kind, queries, wanted, block):
    monkeypatch.setattr(heads, "SCORES", block)
    query, view = shared_view(codec, queries)
    mask = logical_mask(kind, view)
    weights = wanted_weights(expected(query, view, mask)[1], query, view, mask, wanted)
    pages, new = shown_by(lambda q, v, m: heads.attend(q, v, m, 0.2), query, view, view.align(mask), wanted)
    slots = view.segments[0].tokens
    assert torch.allclose(new, weights[..., slots:], atol=TOLERANCE, rtol=0)
    for row in range(BATCH):
        for page, owner in enumerate(view.segments[0].owners[row].tolist()):
            there = slice(page * PAGE, page * PAGE + PAGE)
            if owner == KV_HEADS:
                assert not pages[row, page].any(), "what is nobody's has no weight"
            else:
                assert torch.allclose(pages[row, page], weights[row, owner, ..., there], atol=TOLERANCE, rtol=0)


def plain_view(codec, queries, seed=0):
    """The shared view with slots for each head: what `blocks` reads."""
    query, view = shared_view(codec, queries, seed)
    return query, view.spread()


@over
@pytest.mark.parametrize("wanted", [None, 3])
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("block", [100, 350], ids=["by_one", "by_two"])
def test_observing_shows_the_weights_of_the_reference(monkeypatch, codec, kind, queries, wanted, extra, block):
    """In blocks of queries, the last of which is short, whether attention is ours or only looked at."""
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", block)
    query, view = plain_view(codec, queries)
    mask = logical_mask(kind, view)
    aligned = view.align(mask)
    weights = reference.attend(query, view, aligned, 0.2, **extra)[1]
    weights = wanted_weights(weights, query, view, mask, wanted)

    def observe(q, v, m):
        blocks.observe(q, v, lambda part: part_of(m, part), v.counted(m, v.tokens), 0.2, **extra)

    def attend(q, v, m):
        blocks.attend(q, v, m, 0.2, **extra)

    for look in (observe, attend):
        (shown,) = shown_by(look, query, view, aligned, wanted)
        assert torch.allclose(shown, weights, atol=TOLERANCE, rtol=0)
