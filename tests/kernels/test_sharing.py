"""Keys and values that rows of a batch share, on every path: as if each row had its own copy of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvplug.codecs import CODECS
from kvplug.kernels import attend, blocks, dense, reference
from kvplug.view import KVView, Segment, Sharing, Watch

HEADS, GROUP, DIM = 2, 3, 16


def random_view(codec, which, lengths, generator):
    """A view of shared slots, then of slots of each row's own, and the same view with all of it written out."""
    codec, rows, batch = CODECS[codec].tokenwise(), max(which) + 1, len(which)
    which = torch.tensor(which)
    sharing = Sharing.of(which, rows, torch.device("cpu"))
    segments, apart, start = [], [], 0
    for number, length in enumerate(lengths):
        shared = number < len(lengths) - 1
        sides = [torch.randn(rows if shared else batch, HEADS, length, DIM, generator=generator) for _ in range(2)]
        keys, values = (codec.encode(x) for x in sides)
        segments.append(Segment(keys, values, start=start, sharing=sharing if shared else None))
        own = [codec.encode(x[which] if shared else x) for x in sides]
        apart.append(Segment(*own, start=start))
        start += length
    return [KVView(parts, start, 1, torch.float32) for parts in (segments, apart)]


@settings(max_examples=40, deadline=None)
@given(
    codec=st.sampled_from(["dense", "int8", "int4", "fp8"]),
    which=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=3),
    masked=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_path_gives_what_copies_give(codec, which, lengths, masked, softcap, sinks, seed):
    generator = torch.Generator().manual_seed(seed)
    which = [sorted(set(which)).index(x) for x in which]
    view, apart = random_view(codec, which, lengths, generator)
    query = torch.randn(len(which), HEADS * GROUP, 1, DIM, generator=generator)
    mask = None
    if masked:
        mask = torch.rand(len(which), 1, 1, view.seen, generator=generator) > 0.3
        mask[..., -1] = True
    extra = torch.randn(HEADS * GROUP, generator=generator) if sinks else None
    expected = reference.attend(query, apart, mask, 0.25, softcap, extra)[0]
    assert torch.allclose(reference.attend(query, view, mask, 0.25, softcap, extra)[0], expected, atol=1e-6)
    assert torch.allclose(attend(query, view, mask, 0.25, softcap, extra), expected, atol=1e-5)
    assert torch.allclose(blocks.attend(query, view, mask, 0.25, softcap, extra), expected, atol=1e-5)
    if softcap is None and extra is None:
        assert torch.allclose(dense.attend(query, view, mask, 0.25), expected, atol=1e-5)


@pytest.mark.parametrize("which", [[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 2, 1]])
def test_the_fused_kernel_is_its_plain_twin(which, monkeypatch):
    generator = torch.Generator().manual_seed(len(which) + which[0])
    view, _ = random_view("dense", which, [300, 9], generator)
    query = torch.randn(4, HEADS * GROUP, 1, DIM, generator=generator)
    assert dense._FUSED is not None, "this torch has no such kernel: nothing is compared"
    fused = blocks.attend(query, view, None, 0.25)
    used = []
    monkeypatch.setattr(dense, "_FUSED", None)
    monkeypatch.setattr(blocks, "_with_sums", lambda *args, plain=blocks._with_sums: used.append(1) or plain(*args))
    assert torch.allclose(fused, blocks.attend(query, view, None, 0.25), atol=1e-6)
    assert len(used) == 2


def test_large_scores_do_not_overflow():
    generator = torch.Generator().manual_seed(1)
    view, apart = random_view("dense", [0, 0, 1], [30, 5], generator)
    query = 300 * torch.randn(3, HEADS * GROUP, 1, DIM, generator=generator)
    assert torch.allclose(
        blocks.attend(query, view, None, 1.0), reference.attend(query, apart, None, 1.0)[0], atol=1e-4
    )


def test_a_watch_sees_each_row_by_itself():
    generator = torch.Generator().manual_seed(3)
    view, apart = random_view("dense", [0, 0, 1], [30, 5], generator)
    query = torch.randn(3, HEADS * GROUP, 1, DIM, generator=generator)
    found = []
    for one in (view, apart):
        one.watch = Watch(None, found.append)
        blocks.attend(query, one, None, 0.25)
    assert torch.allclose(*found, atol=1e-6)


def test_rows_and_readers_are_told():
    one = Sharing.of(torch.tensor([0, 0, 1, 1]), 2, torch.device("cpu"))
    assert (one.readers, one.order, one.place) == (2, None, None)
    other = Sharing.of(torch.tensor([1, 0, 1]), 2, torch.device("cpu"))
    assert other.readers == 2
    x = torch.arange(3.0)[:, None, None]
    assert other.apart(other.together(x)).equal(x)
