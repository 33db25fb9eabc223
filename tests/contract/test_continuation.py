"""A cache that was filled one way and goes on another: by hand, with embeddings, with the long mask."""

import pytest
import torch
from transformers import DynamicCache

from tests import models
from tests.caches import EVICTING, EXACT, KINDS, ROOMY, named
from tests.oracles import LOGITS, NAME, SAME_KERNEL, feed, row_logits
from tests.tape import Tape


def keys_and_values(ids):
    """Keys and values of every layer for `ids`, as the default cache holds them after one forward."""
    cache = DynamicCache()
    feed(models.tiny_llama(), cache, ids, [ids.shape[1]])
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("kind", **named(ROOMY))
def test_filled_by_hand_then_generate_with_the_long_mask(kind):
    """`update()` without further arguments, in two blocks, and nothing reads the result."""
    ids = models.tokens(2, 20)
    stored, results = keys_and_values(ids[:, :19]), []
    for make in (lambda m: DynamicCache(), kind.make):
        model = models.tiny_llama()
        cache = make(model)
        for layer, (keys, values) in enumerate(stored):
            cache.update(keys[:, :, :12], values[:, :, :12], layer)
            cache.update(keys[:, :, 12:], values[:, :, 12:], layer)
        results.append(
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=10,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        )
    assert results[1].sequences.equal(results[0].sequences)
    assert torch.allclose(torch.stack(results[1].logits), torch.stack(results[0].logits), atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("kind", **named([k for k in EVICTING if k.exact and k.positional]))
def test_filled_by_hand_the_budget_holds(model, kind):
    """What was filled in by hand is dropped and read back as if a forward had brought it."""
    ids = models.tokens(1, 20)
    cache = kind.make(model)
    for layer, (keys, values) in enumerate(keys_and_values(ids[:, :19])):
        cache.update(keys[:, :, :12], values[:, :, :12], layer)
        cache.update(keys[:, :, 12:], values[:, :, 12:], layer)
    assert cache.get_seq_length() == 19
    with torch.no_grad():
        result = model(ids[:, 19:], **{NAME: cache}).logits[0, -1]
    # The first layer's inputs are the same tokens; the second's come from full attention, as they were given.
    with Tape(model, cache) as tape:
        feed(model, cache, models.tokens(1, 6, seed=2), [1, 5])
    assert result.isfinite().all()
    reference = kind.make(model)
    for layer, (keys, values) in enumerate(keys_and_values(ids[:, :19])):
        reference.update(keys, values, layer)
    with torch.no_grad():
        again = model(ids[:, 19:], **{NAME: reference}).logits[0, -1]
    assert torch.allclose(result, again, atol=SAME_KERNEL, rtol=0)
    assert cache.memory().tokens_kept == sum(kind.budgets()) / 2
    assert tape.events


@pytest.mark.parametrize("kind", **named(KINDS))
def test_going_on_with_embeddings_is_going_on_with_tokens(model, kind):
    ids = models.tokens(2, 20)
    embeds = model.get_input_embeddings()(ids).detach()
    by_ids, by_embeds = kind.make(model), kind.make(model)
    expected = feed(model, by_ids, ids, [12, 1, 7])[:, 12:]
    feed(model, by_embeds, ids[:, :12], [12])
    with torch.no_grad():
        result = [
            model(inputs_embeds=embeds[:, start:end], **{NAME: by_embeds}).logits for start, end in ((12, 13), (13, 20))
        ]
    assert torch.equal(torch.cat(result, dim=1), expected)


@pytest.mark.parametrize("kind", **named(EXACT))
def test_generate_from_embeddings_of_the_whole_after_a_turn(model, kind):
    """`generate` is given the embeddings of everything, those that the cache has seen included."""
    ids = models.tokens(1, 18)
    cache = kind.make(model)
    feed(model, cache, ids[:, :11], [11])
    made = model.generate(
        inputs_embeds=model.get_input_embeddings()(ids).detach(), attention_mask=torch.ones_like(ids),
        past_key_values=cache, max_new_tokens=6, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    row = torch.cat([ids[0], made.sequences[0, -6:]])[:-1]
    expected = row_logits(model, row, [11, 7] + [1] * 5, kind.keeps)[17:]
    assert torch.allclose(torch.cat(made.logits), expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(EXACT))
def test_generate_given_only_the_new_tokens_and_the_long_mask(model, kind):
    ids = models.tokens(1, 18)
    cache = kind.make(model)
    feed(model, cache, ids[:, :11], [11])
    made = model.generate(
        ids[:, 11:], attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=6, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    row = torch.cat([ids[0], made.sequences[0, -6:]])[:-1]
    expected = row_logits(model, row, [11, 7] + [1] * 5, kind.keeps)[17:]
    assert torch.allclose(torch.cat(made.logits), expected, atol=LOGITS, rtol=0)
