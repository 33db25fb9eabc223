"""A view's mask is the logical one with its columns at the positions of the slots, and its handles are plain tensors to
whoever does not know them.
"""

import pytest
import torch

from kvplug.codecs import CODECS
from kvplug.view import KVTensor, KVView, Segment


def view_at(positions, seen, queries, heads=2, **options):
    """`positions` `[rows, heads or 1, slots]` of stored tokens; the last `queries` tokens are new."""
    slots = positions.shape[-1]
    stored = CODECS["dense"].encode(torch.arange(2.0 * heads * slots * 4).reshape(2, heads, slots, 4))
    new = CODECS["dense"].encode(torch.ones(2, heads, queries, 4))
    segments = [Segment(stored, stored, positions=positions), Segment(new, new, start=seen - queries)]
    return KVView(segments, seen=seen, queries=queries, dtype=torch.float32, **options)


POSITIONS = {
    "shared": torch.tensor([[[0, 1, 5, 3]]]),
    "by_row": torch.tensor([[[0, 1, 5, 3]], [[2, 4, 5, 6]]]),
    "by_head": torch.tensor([[[0, 1, 5, 3], [6, 5, 0, 2]]]),
    "by_row_and_head": torch.tensor([[[0, 1, 5, 3], [6, 5, 0, 2]], [[1, 2, 3, 4], [0, 3, 5, 6]]]),
    "holes": torch.tensor([[[0, 1, -1, 3]], [[-1, -1, 5, -1]]]),
}
SEEN, QUERIES = 10, 3


def brute_force(positions, mask, heads):
    """`[2, heads, queries, slots + queries]`: what each query sees, by looking every slot's position up in the mask."""
    width = positions.shape[-1] + QUERIES
    result = torch.zeros(2, heads, QUERIES, width, dtype=torch.bool)
    for row in range(2):
        for head in range(heads):
            of_head = head // (heads // positions.shape[1]) if positions.shape[1] > 1 else 0
            slots = positions[min(row, len(positions) - 1), of_head].tolist() + list(range(SEEN - QUERIES, SEEN))
            for query in range(QUERIES):
                for slot, position in enumerate(slots):
                    if position < 0:
                        continue
                    if mask is None:
                        visible = position <= SEEN - QUERIES + query
                    elif mask.ndim == 2:
                        visible = position <= SEEN - QUERIES + query and bool(mask[row, position])
                    else:
                        value = mask[min(row, len(mask) - 1), min(head, mask.shape[1] - 1), query, position]
                        visible = bool(value) if mask.dtype == torch.bool else bool(value > -1e30)
                    result[row, head, query, slot] = visible
    return result


def masks():
    generator = torch.Generator().manual_seed(0)
    visible = torch.rand(2, 1, QUERIES, SEEN, generator=generator) < 0.7
    by_head = torch.rand(2, 4, QUERIES, SEEN, generator=generator) < 0.7
    return {
        "none": None,
        "padding": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * 10]),
        "bool": visible,
        "one_row": visible[:1],
        "additive": torch.zeros(visible.shape).masked_fill_(~visible, torch.finfo(torch.float32).min),
        "by_head": by_head,
        "longer": torch.cat([visible, torch.ones(2, 1, QUERIES, 5, dtype=torch.bool)], -1),
    }


@pytest.mark.parametrize("mask", masks().values(), ids=masks())
@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_columns_are_gathered_at_the_positions_of_the_slots(positions, mask):
    view = view_at(positions, SEEN, QUERIES, holes=bool((positions < 0).any()))
    aligned = view.align(mask)
    visible = aligned if aligned.dtype == torch.bool else aligned > -1e30
    heads = max(4 if visible.shape[1] == 4 else 2, visible.shape[1])
    expected = brute_force(positions, mask, heads)
    if 1 < visible.shape[1] < heads:
        visible = visible.repeat_interleave(heads // visible.shape[1], 1)
    assert torch.equal(visible.expand(2, heads, -1, -1), expected)


def test_one_query_without_a_mask_needs_none():
    assert view_at(POSITIONS["shared"], SEEN, 1).align(None) is None


def test_one_query_without_a_mask_does_not_see_empty_slots():
    aligned = view_at(POSITIONS["holes"], SEEN, 1, holes=True).align(None)
    assert aligned.expand(2, 1, 1, 5)[:, 0, 0].tolist() == [
        [True, True, False, True, True],
        [False, False, True, False, True],
    ]


@pytest.mark.parametrize("columns", [4, 9])
def test_a_mask_with_too_few_columns_raises(columns):
    view = view_at(POSITIONS["shared"], SEEN, QUERIES)
    for mask in (torch.ones(2, columns), torch.ones(2, 1, QUERIES, columns, dtype=torch.bool)):
        with pytest.raises(ValueError, match=rf"attention_mask.*{columns}.*{SEEN}"):
            view.align(mask)


def handles(queries=3, **options):
    old = torch.randn(2, 2, 7, 4)
    new = torch.randn(2, queries, 2, 4).transpose(1, 2)  # as it comes from a model's projection
    encode = CODECS["dense"].encode
    segments = [Segment(encode(old), encode(old + 1)), Segment(encode(new), encode(new + 1), start=7)]
    view = KVView(segments, seen=7 + queries, queries=queries, dtype=torch.float32, **options)
    return *KVTensor.of(view), torch.cat([old, new], 2)


OPERATIONS = {
    "matmul": lambda x: x @ torch.ones(4, 3),
    "transpose": lambda x: x.transpose(2, 3),
    "reshape": lambda x: x.reshape(4, 10, 4),
    "view": lambda x: x.view(2, 2, 40),
    "slice": lambda x: x[:, :, 2:5],
    "repeat": lambda x: x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :, None].expand(2, 2, 3, 10, 4),
    "cat": lambda x: torch.cat([x, x], 2),
    "clone": lambda x: x.clone(),
    "to": lambda x: x.to(torch.float64),
    "arithmetic": lambda x: x * 2 + 1,
    "sdpa": lambda x: torch.nn.functional.scaled_dot_product_attention(torch.ones(2, 2, 1, 4), x, x),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_a_handle_is_the_decoded_tensor_to_any_operation(operation):
    keys, values, plain = handles()
    assert keys.shape == values.shape == (2, 2, 10, 4)
    assert keys.dtype == torch.float32
    assert torch.equal(operation(keys), operation(plain))
    assert torch.equal(operation(values), operation(plain + 1))
    assert not isinstance(operation(keys), KVTensor)


def test_a_first_forward_s_handle_can_be_viewed():
    """A single block, transposed as the model's projection leaves it: a handle says that it is contiguous."""
    new = torch.randn(2, 5, 2, 4).transpose(1, 2)
    segment = Segment(CODECS["dense"].encode(new), CODECS["dense"].encode(new))
    keys, _ = KVTensor.of(KVView([segment], seen=5, queries=5, dtype=torch.float32))
    assert keys.is_contiguous()
    assert torch.equal(keys.view(2, 2, 20), new.reshape(2, 2, 20))
    assert torch.equal(keys.reshape(4, 5, 4), new.reshape(4, 5, 4))


def test_the_layer_settles_once_both_handles_were_read():
    calls = []
    keys, values, _ = handles(done=lambda query, mask: calls.append((query, mask)))
    keys.sum()
    keys.sum()
    assert calls == []
    values.sum()
    assert calls == [(None, None)]
    values.sum()
    assert calls == [(None, None)]


def test_a_handle_of_an_evicting_cache_refuses_and_says_what_to_do():
    keys, _, _ = handles(evicting=True)
    with pytest.raises(ValueError, match=r"kvplug.attach"):
        keys @ torch.ones(4, 3)
    assert "KVTensor" in repr(keys)
