"""The slow references against transformers' own forward: an oracle that is wrong proves nothing."""

import pytest
import torch
from transformers import DynamicCache

from tests import models
from tests.oracles import LOGITS, SAME_KERNEL, Keep, compact_logits, feed, masked_logits, row_logits, visibility
from tests.tape import Tape

CHUNKS = {
    "prompt_then_steps": [15] + [1] * 25,
    "turns": [7, 7, 1, 1, 1, 9, 1, 1, 1, 11],
    "eights": [5] * 8,
    "at_once": [40],
}


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("rope", models.ROPES)
def test_full_visibility_is_the_plain_forward(chunks, rope):
    model = models.tiny_llama(rope_parameters=dict(models.ROPES[rope]))
    ids = models.tokens(1, 40)
    with torch.no_grad():
        plain = model(ids, use_cache=False).logits[0]
    assert torch.allclose(row_logits(model, ids[0], chunks, Keep()), plain, atol=SAME_KERNEL, rtol=0)
    assert torch.allclose(feed(model, DynamicCache(), ids, chunks)[0], plain, atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize(
    "keeps",
    [Keep(window=6), Keep(sinks=2, window=6), [Keep(window=6), Keep(window=10)], [Keep(2, 8), Keep(2, 4)]],
    ids=["window", "sinks", "windows_by_layer", "budgets_by_layer"],
)
def test_dropped_tokens_are_masked_tokens(model, chunks, keeps):
    ids = models.tokens(1, 40)
    slow = row_logits(model, ids[0], chunks, keeps)
    masked = masked_logits(model, ids, chunks, keeps)[0]
    assert torch.allclose(slow, masked, atol=SAME_KERNEL, rtol=0)
    plain = row_logits(model, ids[0], chunks, Keep())
    assert (slow - plain).abs().max() > 1 or len(chunks) == 1, "what is dropped must show, or nothing is tested"


@pytest.mark.parametrize("rope", models.ROPES)
@pytest.mark.parametrize("sinks", [0, 2, 4])
def test_compact_positions_are_those_of_a_fresh_short_sequence(rope, sinks):
    model = models.tiny_llama(num_hidden_layers=1, rope_parameters=dict(models.ROPES[rope]))
    ids, keep = models.tokens(1, 30), Keep(sinks, 6, compact=True)
    slow = row_logits(model, ids[0], [12] + [1] * 18, keep)
    for seen in range(12, 30):
        fresh = compact_logits(model, ids, keep, seen)
        assert torch.allclose(slow[seen], fresh, atol=SAME_KERNEL * 5, rtol=0)


def test_stored_sets():
    assert Keep(window=3).stored(5) == [2, 3, 4]
    assert Keep(2, 3).stored(4) == [0, 1, 2, 3]
    assert Keep(2, 3).stored(9) == [0, 1, 6, 7, 8]
    assert Keep().stored(3) == [0, 1, 2]


def test_visibility_of_a_window_of_two_fed_as_two_and_two():
    expected = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    assert visibility([2, 2], Keep(window=2)).equal(expected)
    assert visibility([1, 1, 1, 1], Keep(window=2))[3].tolist() == [False, True, True, True]


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "chunked_prefill": {"prefill_chunk_size": 5},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


ONE_ROW = "prompt_lookup"  # transformers: "assisted generate is only supported for batch_size = 1"


@pytest.mark.parametrize(
    ("mode", "padded"), [(m, p) for m in MODES for p in (False, True) if (m, p) != (ONE_ROW, True)], ids=str
)
def test_a_tape_of_the_default_cache_replays(model, mode, padded):
    cache = DynamicCache()
    _, ids, mask = models.left_padded([5, 14, 9, 1] if padded else [12])
    with Tape(model, cache) as tape:
        model.generate(
            ids, attention_mask=mask, past_key_values=cache, max_new_tokens=12, **{"do_sample": False, **MODES[mode]}
        )
    assert tape.worst(Keep(), mask) < LOGITS


def test_a_tape_shows_a_reordering_that_did_not_happen(model):
    cache = DynamicCache()
    cache.reorder_cache = lambda index: None
    with Tape(model, cache) as tape:
        model.generate(models.tokens(1, 12), past_key_values=cache, max_new_tokens=12, num_beams=4, do_sample=False)
    assert tape.worst(Keep()) > 0.1


def test_a_tape_shows_a_token_that_should_have_been_dropped(model):
    with Tape(model, cache := DynamicCache()) as tape:
        feed(model, cache, models.tokens(1, 20), [10] + [1] * 10)
    assert tape.worst(Keep()) < LOGITS
    assert tape.worst(Keep(window=8)) > 0.1
