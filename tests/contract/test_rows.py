"""Rows that move: beam search, repeated and selected rows. All state of a row moves with it, codes and positions too.

A reordering that does nothing must be seen here, which `test_a_reordering_that_does_nothing_is_seen` holds.
"""

import pytest
import torch
from transformers import DynamicCache

from tests import models
from tests.caches import EXACT, KINDS, ROOMY, named
from tests.oracles import LOGITS, SAME_KERNEL, batch_logits, feed, row_logits
from tests.tape import Tape

# The sum of 16 log-probabilities, each within LOGITS, divided by the length.
SCORES = 1e-3


def beam_search(model, cache, ids, mask=None, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, past_key_values=cache, num_beams=4,
        num_return_sequences=4, max_new_tokens=16, do_sample=False, length_penalty=0.0,
        return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip


def forced_score(model, row, prompt, keeps):
    """Sum of the log-probabilities of what follows the prompt, each token forced."""
    logits = row_logits(model, row[:-1], [prompt] + [1] * (len(row) - 1 - prompt), keeps)[prompt - 1 :]
    return logits.log_softmax(-1).gather(-1, row[prompt:, None]).sum()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", **named(EXACT))
def test_beam_scores_are_the_scores_of_their_sequences(model, kind, batch):
    ids = models.tokens(batch, 12)
    made = beam_search(model, kind.make(model), ids)
    assert len({tuple(row.tolist()) for row in made.sequences}) == 4 * batch
    for row, score in zip(made.sequences, made.sequences_scores, strict=True):
        expected = forced_score(model, row, 12, kind.keeps)
        assert abs(score - expected) < SCORES


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", **named(KINDS))
def test_every_layer_answers_each_beam(model, kind, batch):
    """The prompt is shorter than any budget and the beams outgrow it, so reordering comes before and after dropping."""
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        beam_search(model, cache, models.tokens(batch, 4))
    moves = [event[1] for event in tape.events if event[0] == "reorder_cache"]
    assert any(not index.equal(torch.arange(len(index))) for index in moves)
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("kind", **named(KINDS))
def test_beams_of_a_padded_batch(model, kind):
    _, ids, mask = models.left_padded([5, 12, 2])
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        beam_search(model, cache, ids, mask)
    assert tape.worst(kind.keeps, mask) < LOGITS


@pytest.mark.parametrize("kind", **named(KINDS))
def test_a_reordering_that_does_nothing_is_seen(model, kind):
    cache = kind.make(model)
    for layer in cache.layers:
        layer.reorder_cache = lambda index: None
    with Tape(model, cache) as tape:
        made = beam_search(model, cache, models.tokens(1, 12))
    assert tape.worst(kind.keeps) > 0.1
    if kind.exact:
        scores = torch.stack([forced_score(model, row, 12, kind.keeps) for row in made.sequences])
        assert (made.sequences_scores - scores).abs().max() > SCORES


@pytest.mark.parametrize("kind", **named(KINDS))
def test_a_prefix_of_one_row_goes_on_as_several(model, kind):
    """A prefix is read once, repeated, and goes on with three suffixes, of which two are selected to go on further."""
    prefix, more = models.tokens(1, 11), models.tokens(3, 14, seed=3)
    ids = torch.cat([prefix.expand(3, -1), more], dim=1)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        feed(model, cache, prefix, [11])
        cache.batch_repeat_interleave(3)
        middle = feed(model, cache, more[:, :6], [4, 1, 1])
        cache.batch_select_indices(torch.tensor([2, 0]))
        end = feed(model, cache, more[[2, 0], 6:], [1, 5, 1, 1])
    assert cache.get_seq_length() == 25
    assert tape.worst(kind.keeps) < LOGITS
    if kind.exact:
        chunks = [11, 4, 1, 1, 1, 5, 1, 1]
        expected = batch_logits(model, ids, torch.ones_like(ids), chunks, kind.keeps)
        assert torch.allclose(middle, expected[:, 11:17], atol=LOGITS, rtol=0)
        assert torch.allclose(end, expected[[2, 0], 17:], atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_rows_of_different_lengths_are_repeated_and_selected(model, kind):
    _, ids, mask = models.left_padded([5, 14, 2])
    more = models.tokens(6, 9, seed=3)
    choice = torch.tensor([4, 1, 3])
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        feed(model, cache, ids, [14], mask)
        cache.batch_repeat_interleave(2)
        mask = torch.cat([mask.repeat_interleave(2, 0), torch.ones_like(more)], dim=1)
        feed(model, cache, more[:, :5], [1, 3, 1], mask[:, :19])
        cache.batch_select_indices(choice)
        feed(model, cache, more[choice, 5:], [2, 1, 1], mask[choice])
    assert tape.worst(kind.keeps, mask[::2, :14]) < LOGITS


@pytest.mark.parametrize("kind", **named(KINDS))
def test_rows_chosen_by_a_boolean_mask(model, kind):
    """As DynamicCache's indexing takes it."""
    ids, rows = models.tokens(3, 20), torch.tensor([True, False, True])
    cache, straight = kind.make(model), kind.make(model)
    feed(model, cache, ids[:, :12], [12])
    cache.batch_select_indices(rows)
    feed(model, straight, ids[rows, :12], [12])
    expected = feed(model, straight, ids[rows, 12:], [1, 7])
    assert torch.allclose(feed(model, cache, ids[rows, 12:], [1, 7]), expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(ROOMY))
def test_num_return_sequences_over_a_prefix_of_one_row(kind):
    """The prefix was read with one row; `generate` expands its input, the caller the cache."""
    prefix, prompt = models.tokens(1, 9), models.tokens(1, 13)
    prompt[:, :9] = prefix
    results = []
    for make in (lambda m: DynamicCache(), kind.make):
        model = models.tiny_llama()
        cache = make(model)
        feed(model, cache, prefix, [9])
        cache.batch_repeat_interleave(3)
        torch.manual_seed(11)
        results.append(
            model.generate(
                prompt,
                past_key_values=cache,
                do_sample=True,
                num_return_sequences=3,
                max_new_tokens=10,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert results[1].sequences.equal(results[0].sequences)
    assert torch.allclose(torch.stack(results[1].logits), torch.stack(results[0].logits), atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_rows_of_an_empty_cache(model, kind):
    """`generate` may reorder or repeat before anything is stored: nothing happens, and nothing breaks."""
    cache = kind.make(model)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    assert cache.get_seq_length() == 0
    with Tape(model, cache) as tape:
        feed(model, cache, models.tokens(2, 12), [9, 1, 1, 1])
    assert tape.worst(kind.keeps) < LOGITS
