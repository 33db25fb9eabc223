"""Attention on latents against the reference over the keys and values that are made of them."""

import pytest
import torch

from kvplug.kernels import latent, reference
from kvplug.view import KVView, Segment, Sharing, Watch
from tests.kernels.test_twins import MASKS, PARTS, mask_of, view_of

HEADS, RANK, ROPE, NOPE, VALUE = 4, 24, 8, 16, 12
# The products of a latent are summed in another order; scores of size 50 move a weight by 2**-16.
TOLERANCE = 5e-5


def expansion(up):
    """The model's own way with weights `up` `[heads, nope + value, rank]`, a loop over heads."""

    def expand(latents, rotated):
        made = [latents[:, 0] @ up[head].T for head in range(HEADS)]
        keys = [torch.cat([x[..., :NOPE], rotated[:, 0]], dim=-1) for x in made]
        return torch.stack(keys, dim=1), torch.stack([x[..., NOPE:] for x in made], dim=1)

    return expand


def case(seed, queries, batch=2):
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(HEADS, NOPE + VALUE, RANK, generator=generator) / RANK**0.5
    return up, torch.randn(batch, HEADS, queries, NOPE + ROPE, generator=generator)


def compare(query, view, up, mask, **more):
    """Output and watched weights of the one way and of the other."""
    seen = []
    watched = view.watch
    if watched is not None:
        watched = Watch(watched.queries, seen.append)
    view.watch = watched
    result = latent.attend(query, view, up, mask, 0.3, **more)
    made = latent.expanded(view, expansion(up))
    expected, weights = reference.attend(query, made, mask, 0.3, **more)
    assert result.shape == expected.shape == (*query.shape[:3], VALUE)
    assert torch.allclose(result, expected, atol=TOLERANCE, rtol=0)
    return (torch.cat(seen, dim=3) if seen else None), weights


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("queries", [1, 3])
def test_latents_give_what_their_keys_and_values_give(parts, mask, queries):
    view = view_of(PARTS[parts], kv_heads=1, width=RANK, value_width=ROPE, queries=queries)
    up, query = case(3, queries)
    aligned = mask_of(mask, view, 2, HEADS, 1, queries)
    view.watch = Watch(None, None)
    told, weights = compare(query, view, up, aligned)
    if aligned is None:
        assert told.shape == (2, 1, HEADS, queries, view.tokens)
        assert torch.allclose(told[:, 0], weights, atol=TOLERANCE, rtol=0)


def test_softcap_and_learned_sinks():
    view = view_of(PARTS["mixed"], kv_heads=1, width=RANK, value_width=ROPE, queries=2)
    up, query = case(4, 2)
    compare(query, view, up, None, softcap=5.0, sinks=torch.linspace(0, 2, HEADS))


def test_blocks_of_queries_are_put_together(monkeypatch):
    view = view_of(PARTS["int8_and_new"], kv_heads=1, width=RANK, value_width=ROPE, queries=7)
    view.watch = Watch(5, None)
    up, query = case(5, 7)
    monkeypatch.setattr(latent, "SCORES", 2 * HEADS * view.tokens * 2)
    told, weights = compare(query, view, up, None)
    assert torch.allclose(told[:, 0], weights[:, :, 2:], atol=TOLERANCE, rtol=0)


def test_slots_with_positions_and_holes():
    view = view_of(PARTS["mixed"], kv_heads=1, width=RANK, value_width=ROPE)
    first = view.segments[1]
    positions = torch.arange(first.tokens).flip(0).expand(2, 1, -1).clone()
    positions[0, :, :7] = -1
    holes = Segment(first.keys, first.values, positions=positions)
    view = KVView([holes, *view.segments[2:]], seen=first.tokens + 2, queries=1, dtype=torch.float32, holes=True)
    up, query = case(6, 1)
    compare(query, view, up, view.align(torch.rand(2, view.seen) < 0.7))


def test_rows_that_share_latents():
    shared = view_of([("int8", "int8", 30)], batch=2, kv_heads=1, width=RANK, value_width=ROPE).segments[0]
    which = Sharing.of(torch.tensor([1, 0, 1]), 2, torch.device("cpu"))
    own = view_of([("dense", "dense", 3)], batch=3, kv_heads=1, width=RANK, value_width=ROPE).segments[0]
    segments = [Segment(shared.keys, shared.values, sharing=which), Segment(own.keys, own.values, start=30)]
    up, query = case(7, 1, batch=3)
    compare(query, KVView(segments, seen=33, queries=1, dtype=torch.float32), up, None)
