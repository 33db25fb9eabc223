"""What every query sees, however the tokens are fed: at once, in chunks, in turns, one by one, without positions.

A query sees what was stored before its forward, and the tokens of its own forward up to itself.
"""

import pytest
import torch
from transformers import DynamicCache

import kvplug
from tests import models
from tests.caches import EVICTING, EXACT, KINDS, keep, named
from tests.oracles import LOGITS, SAME_KERNEL, Keep, batch_logits, feed, masked_logits, row_logits, spans
from tests.tape import Tape

FEEDINGS = {
    "prompt_then_steps": [15] + [1] * 25,
    "turns": [7, 7, 1, 1, 1, 9, 1, 1, 1, 11],
    "eights": [5] * 8,
    "at_once": [40],
    "one_by_one": [1] * 40,
}


@pytest.mark.parametrize("chunks", FEEDINGS.values(), ids=FEEDINGS)
@pytest.mark.parametrize("kind", **named(EXACT))
def test_logits_equal_the_slow_reference(model, kind, chunks):
    ids = models.tokens(1, 40)
    logits = feed(model, kind.make(model), ids, chunks)[0]
    assert torch.allclose(logits, row_logits(model, ids[0], chunks, kind.keeps), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("chunks", FEEDINGS.values(), ids=FEEDINGS)
@pytest.mark.parametrize(
    "kind", **named([k for k in EXACT if k.positional and not any(keep.compact for keep in k.keeps)])
)
def test_logits_equal_one_masked_forward(kind, chunks):
    ids = models.tokens(1, 40)
    model = models.tiny_llama()
    logits = feed(model, kind.make(model), ids, chunks)
    expected = masked_logits(models.tiny_llama(), ids, chunks, kind.keeps)
    assert torch.allclose(logits, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("chunks", FEEDINGS.values(), ids=FEEDINGS)
@pytest.mark.parametrize("kind", **named(KINDS))
def test_every_layer_attends_what_it_should(model, kind, chunks):
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        feed(model, cache, models.tokens(2, 40), chunks)
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("chunks", FEEDINGS.values(), ids=FEEDINGS)
@pytest.mark.parametrize("kind", **named(KINDS))
def test_seen_counts_tokens_and_stored_keeps_the_budget(model, kind, chunks):
    cache, ids = kind.make(model), models.tokens(1, 40)
    for start, end in spans(chunks):
        feed(model, cache, ids[:, start:end], [end - start])
        assert cache.get_seq_length() == end
        assert cache.get_mask_sizes(3, 0) == (end + 3, 0)
        assert cache.memory().tokens_seen == end
        assert cache.memory().tokens_kept == pytest.approx(kind.kept(end, chunks[0]))


@pytest.mark.parametrize("budget", [1, 4, 8, 29])
@pytest.mark.parametrize("codec", [None, "fp8", "int8", "int4"], ids=["exact", "fp8", "int8", "int4"])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_the_prompt_attends_all_of_itself(budget, codec, sinks):
    """Dropping and encoding come after the prompt's own attention: its logits and first token are the full cache's."""
    if sinks >= budget:
        sinks = 0
    ids = models.tokens(1, 30)
    expected = feed(models.tiny_llama(), DynamicCache(), ids, [30])
    model = models.tiny_llama()
    cache = kvplug.StreamingLLMCache(model, sinks, budget - sinks, codec=codec)
    logits = feed(model, cache, ids, [30])
    assert torch.allclose(logits, expected, atol=SAME_KERNEL, rtol=0)
    assert cache.memory().tokens_kept == budget
    cache.reset()
    first = model.generate(ids, past_key_values=cache, max_new_tokens=1, do_sample=False)[0, -1]
    assert first == expected[0, -1].argmax()


@pytest.mark.parametrize("length", [6, 7, 8, 9, 10])
@pytest.mark.parametrize("kind", **named([k for k in EXACT if k.budgets() == [8, 8]]))
def test_crossing_the_budget_by_one(kind, length):
    """A budget of 8: the full cache's logits up to the ninth token, the reference's after it."""
    ids = models.tokens(1, length + 1)
    model = models.tiny_llama()
    logits = feed(model, kind.make(model), ids, [length, 1])[0, -1]
    full = feed(models.tiny_llama(), DynamicCache(), ids, [length, 1])[0, -1]
    assert torch.allclose(logits, full, atol=LOGITS, rtol=0) == (length <= 8)
    expected = row_logits(model, ids[0], [length, 1], kind.keeps)[-1]
    assert torch.allclose(logits, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(EVICTING))
def test_a_loop_without_positions_and_a_second_turn(model, kind):
    """No position ids are given: they come from the number of tokens seen, which eviction must not change."""
    ids, chunks = models.tokens(1, 40), [12] + [1] * 8 + [9] + [1] * 11
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        logits = feed(model, cache, ids, chunks)[0]
    assert cache.get_seq_length() == 40
    assert tape.worst(kind.keeps) < LOGITS
    if kind.exact:
        assert torch.allclose(logits, row_logits(model, ids[0], chunks, kind.keeps), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_three_turns_of_generate(model, kind):
    """The sinks stay the first tokens of the first turn; the second turn is longer than any window."""
    cache, ids = kind.make(model), torch.empty(1, 0, dtype=torch.long)
    with Tape(model, cache) as tape:
        for turn, length in enumerate([9, 14, 5]):
            ids = torch.cat([ids, models.tokens(1, length, seed=turn + 20)], dim=1)
            ids = model.generate(
                ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6, do_sample=False
            )
    assert cache.get_seq_length() == ids.shape[1] - 1  # the last token was returned and not fed
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("kind", **named(EXACT))
def test_chunked_prefill(model, kind):
    ids, chunks = models.tokens(1, 23), [5, 5, 5, 5, 3]
    cache = kind.make(model)
    made = model.generate(
        ids, past_key_values=cache, max_new_tokens=8, do_sample=False, prefill_chunk_size=5,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    row = made.sequences[0]
    expected = row_logits(model, row[:-1], chunks + [1] * 7, kind.keeps)[22:]
    assert torch.allclose(torch.cat(made.logits), expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("budgets", [(6, 10), (10, 6)], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["alone", "padded"])
def test_budgets_that_differ_by_layer(budgets, padded):
    """A mask for each layer; the turn of five tokens crosses both budgets."""
    keeps = [Keep(sinks=2, window=budget - 2) for budget in budgets]
    _, ids, mask = models.left_padded([5, 14, 9, 1] if padded else [14])
    more = models.tokens(len(ids), 11, seed=3)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    chunks = [14, 1, 1, 5, 1, 3]
    model = models.tiny_llama()
    cache = kvplug.StreamingLLMCache(model, 2, [b - 2 for b in budgets], positions="original")
    logits = feed(model, cache, ids, chunks, mask) * mask[..., None]
    expected = batch_logits(model, ids, mask, chunks, keeps)
    assert torch.allclose(logits, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("window", [1, 2])
def test_the_smallest_windows(model, window):
    ids, chunks = models.tokens(1, 12), [5, 1, 1, 3, 1, 1]
    for sinks in (0, 1):
        cache = kvplug.StreamingLLMCache(model, sinks, window)
        expected = row_logits(model, ids[0], chunks, keep(sinks=sinks, window=window, compact=True))
        assert torch.allclose(feed(model, cache, ids, chunks)[0], expected, atol=LOGITS, rtol=0)
