"""Padding on the left never takes a sink or a slot: each row of a batch gives what the same row gives alone."""

import pytest
import torch

from tests import models
from tests.caches import EXACT, KINDS, named
from tests.oracles import LOGITS, batch_logits, feed, greedy_row
from tests.tape import Tape

LENGTHS = [5, 14, 9, 1]


@pytest.mark.parametrize("kind", **named(EXACT))
def test_generated_rows_equal_the_slow_reference_alone(model, kind):
    rows, ids, mask = models.left_padded(LENGTHS)
    made = model.generate(
        ids, attention_mask=mask, past_key_values=kind.make(model), max_new_tokens=20, do_sample=False
    )
    for row, prompt in enumerate(rows):
        own = made[row, ids.shape[1] :]
        assert own.equal(greedy_row(model, prompt[0], own, kind.keeps)), f"row of {prompt.shape[1]} tokens"


@pytest.mark.parametrize("kind", **named(KINDS))
def test_every_layer_answers_each_row_as_if_it_were_alone(model, kind):
    _, ids, mask = models.left_padded(LENGTHS)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=20, do_sample=False)
    assert tape.worst(kind.keeps, mask) < LOGITS


@pytest.mark.parametrize("chunks", [[14, 1, 1, 6], [5, 5, 5, 5, 2], [1] * 22], ids=["prompt", "fives", "ones"])
@pytest.mark.parametrize("kind", **named(EXACT))
def test_padding_fed_in_chunks(model, kind, chunks):
    """Some chunks hold nothing but padding for some rows."""
    _, ids, mask = models.left_padded(LENGTHS)
    more = models.tokens(4, 8, seed=5)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    logits = feed(model, kind.make(model), ids, chunks, mask) * mask[..., None]
    assert torch.allclose(logits, batch_logits(model, ids, mask, chunks, kind.keeps), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("chunks", [[11, 7, 1, 1, 4], [11] + [1] * 13], ids=["turns", "one_by_one"])
@pytest.mark.parametrize("kind", **named(KINDS))
def test_padding_before_a_second_turn(kind, chunks, attention):
    """A second turn whose rows differ in length: pads lie in the middle, and none of them may be kept either."""
    _, first, first_mask = models.left_padded([5, 11, 3])
    _, second, second_mask = models.left_padded([7, 1, 4], seed=40)
    ids, mask = torch.cat([first, second], 1), torch.cat([first_mask, second_mask], 1)
    more = models.tokens(3, 6, seed=60)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    model = models.tiny_llama(attention=attention)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        logits = feed(model, cache, ids, chunks, mask) * mask[..., None]
    assert tape.worst(kind.keeps, mask) < LOGITS
    if kind.exact:
        assert torch.allclose(logits, batch_logits(model, ids, mask, chunks, kind.keeps), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(KINDS))
def test_rows_that_hold_different_numbers_of_tokens(model, kind):
    """No padding at first, then some in the middle, while no row has reached its budget: some slots stay empty."""
    first, (_, second, second_mask) = models.tokens(3, 3), models.left_padded([1, 3, 2], seed=40)
    more = models.tokens(3, 9, seed=60)
    ids = torch.cat([first, second, more], 1)
    mask = torch.cat([torch.ones_like(first), second_mask, torch.ones_like(more)], 1)
    cache, chunks = kind.make(model), [3, 3, 1, 1, 7]
    with Tape(model, cache) as tape:
        logits = feed(model, cache, ids, chunks, mask) * mask[..., None]
    assert tape.worst(kind.keeps, mask) < LOGITS
    if kind.exact:
        assert torch.allclose(logits, batch_logits(model, ids, mask, chunks, kind.keeps), atol=LOGITS, rtol=0)
