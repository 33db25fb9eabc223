"""Taking tokens back: `crop`, past recording, and assisted decoding on top of them.

A cropped token was never there. What was dropped can't come back, so a cache that dropped says so and stays as it was.
"""

import pytest
import torch

import kvplug
from tests import models
from tests.caches import EVICTING, KEEPING, KINDS, NO_RECORDING, READS_QUERIES, RECORDS, named
from tests.oracles import LOGITS, SAME_KERNEL, Keep, batch_logits, feed, row_logits
from tests.tape import Tape


@pytest.mark.parametrize("kind", **named(KEEPING))
def test_cropped_tokens_were_never_there(model, kind):
    ids, wrong = models.tokens(2, 20), models.tokens(2, 3, seed=8)
    straight, cropped = kind.make(model), kind.make(model)
    expected = feed(model, straight, ids, [12, 1, 1, 6])
    first = feed(model, cropped, ids[:, :13], [12, 1])
    feed(model, cropped, wrong, [3])
    cropped.crop(-3)
    assert cropped.get_seq_length() == 13
    assert cropped.memory().tokens_kept == 13
    result = torch.cat([first, feed(model, cropped, ids[:, 13:], [1, 6])], dim=1)
    assert torch.allclose(result, expected, atol=SAME_KERNEL, rtol=0)
    assert held(cropped) == held(straight)


def held(cache):
    report = cache.memory()
    return report.total - report.spare


@pytest.mark.parametrize("kind", **named(KINDS))
def test_cropping_nothing_changes_nothing(model, kind):
    ids = models.tokens(1, 24)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        cache.crop(0)
        feed(model, cache, ids[:, :12], [6, 6])
        before = cache.memory()
        cache.crop(0)
        assert cache.get_seq_length() == 12
        assert cache.memory() == before
        feed(model, cache, ids[:, 12:], [1, 1, 10])
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("kind", **named(KEEPING))
@pytest.mark.parametrize("count", [-13, 1, 12], ids=["more_than_there_is", "positive", "positive_length"])
def test_a_crop_that_makes_no_sense_raises(model, kind, count):
    cache, ids = kind.make(model), models.tokens(1, 20)
    feed(model, cache, ids[:, :12], [12])
    with pytest.raises(ValueError, match=str(abs(count))):
        cache.crop(count)
    assert cache.get_seq_length() == 12
    expected = feed(model, kind.make(model), ids, [12, 8])[:, 12:]
    assert torch.allclose(feed(model, cache, ids[:, 12:], [8]), expected, atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("kind", **named([k for k in KINDS if k.holds(5, prompt=4)]))
def test_everything_can_be_cropped_while_nothing_was_dropped(model, kind):
    cache, ids = kind.make(model), models.tokens(1, 20)
    with Tape(model, cache) as tape:
        feed(model, cache, ids[:, :5], [4, 1])
        cache.crop(-5)
        assert cache.get_seq_length() == 0
        feed(model, cache, ids, [11, 1, 8])
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("kind", **named(EVICTING))
def test_cropping_what_was_dropped_raises_and_changes_nothing(model, kind):
    cache, ids = kind.make(model), models.tokens(1, 30)
    with Tape(model, cache) as tape:
        feed(model, cache, ids[:, :20], [12, 1, 7])
        before = cache.memory()
        with pytest.raises(ValueError, match="crop"):
            type(cache).crop(cache, -3)  # unrecorded: the replay must not crop either
        assert cache.get_seq_length() == 20
        assert cache.memory() == before
        feed(model, cache, ids[:, 20:], [1, 1, 8])
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("budgets", [[10, 6], [6, 10]], ids=str)
def test_a_crop_that_one_layer_can_t_do_changes_no_layer(model, budgets):
    cache, ids = kvplug.WindowCache(model, budgets), models.tokens(1, 20)
    feed(model, cache, ids[:, :8], [8])
    before = cache.memory()
    with pytest.raises(ValueError, match="crop"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [8, 8]
    assert cache.memory() == before
    keeps = [Keep(window=budget) for budget in budgets]
    logits = feed(model, cache, ids[:, 8:], [1, 11])[0]
    assert torch.allclose(logits, row_logits(model, ids[0], [8, 1, 11], keeps)[8:], atol=LOGITS, rtol=0)


def test_a_crop_that_a_layer_of_transformers_refuses_changes_no_layer():
    """Sliding layers past their window can't be cropped unless they recorded; then the full ones before them must not
    be either."""
    model = models.tiny_gemma3(layer_types=["full_attention", "sliding_attention"] * 2)
    cache = kvplug.DenseCache(model)
    feed(model, cache, models.tokens(1, 20), [20])
    before = cache.memory()
    with pytest.raises((ValueError, RuntimeError), match="crop"):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [20] * 4
    assert cache.memory() == before


@pytest.mark.skipif(not RECORDS, reason=NO_RECORDING)
@pytest.mark.parametrize("kind", **named([k for k in EVICTING if k.records]))
def test_recording_several_forwards_of_a_padded_batch(model, kind):
    """Two forwards before the crop, the first with padding: what they brought is dropped as if it had been one."""
    _, ids, mask = models.left_padded([5, 14, 9, 1])
    more = models.tokens(4, 10, seed=3)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    draft = torch.cat([ids[:, 14:15], models.tokens(4, 2, seed=8)], dim=1)
    cache = kind.make(model)
    cache.activate_past_recording()
    first = feed(model, cache, ids[:, :14], [14], mask)
    second = feed(model, cache, draft, [3], mask[:, :17])[:, :1]
    cache.crop(-2)
    third = feed(model, cache, ids[:, 15:], [9], mask)
    cache.crop(0)
    assert cache.memory().tokens_kept == kind.kept(24, 15)
    if kind.exact:
        result = torch.cat([first, second, third], 1) * mask[..., None]
        expected = batch_logits(model, ids, mask, [15, 9], kind.keeps)
        assert torch.allclose(result, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("removed", [2, 3])
@pytest.mark.parametrize("kind", **named([k for k in KINDS if k.holds(6, prompt=3)]))
def test_cropping_a_padded_batch(model, kind, removed):
    """Left padding first, nothing dropped yet; what is cropped is tokens of some rows and padding of others. Where what
    they said of others stays said, it decides what is dropped later."""
    _, first, first_mask = models.left_padded([1, 3, 2])
    _, tail, tail_mask = models.left_padded([1, 2, 0], seed=7)
    wrong = models.tokens(3, removed - 2, seed=8)
    more = models.tokens(3, 12, seed=9)
    taken = torch.cat([tail, wrong], 1), torch.cat([tail_mask, torch.ones_like(wrong)], 1)
    cache = kind.make(model)
    feed(model, cache, first, [3], first_mask)
    feed(model, cache, taken[0], [removed], torch.cat([first_mask, taken[1]], 1))
    assert cache.get_seq_length() == 3 + removed
    cache.crop(-removed)
    assert cache.get_seq_length() == 3
    mask = torch.cat([first_mask, torch.ones_like(more)], 1)
    logits = feed(model, cache, more, [1, 4, 1, 6], mask)
    straight = kind.make(model)
    expected = feed(model, straight, torch.cat([first, more], 1), [3, 1, 4, 1, 6], mask)[:, 3:]
    if kind.remembers:  # nothing was dropped before the sixth of the later tokens is read
        logits, expected = logits[:, :6], expected[:, :6]
    # The same forwards on the same tokens, so even codes are the same; only the order of slots may differ.
    assert torch.allclose(logits, expected, atol=SAME_KERNEL, rtol=0)
    if kind.exact:
        ids, chunks = torch.cat([first, more], 1), [3, 1, 4, 1, 6]
        slow = batch_logits(model, ids, mask, chunks, kind.keeps)[:, 3 : 3 + logits.shape[1]]
        assert torch.allclose(logits, slow, atol=LOGITS, rtol=0)


@pytest.mark.skipif(RECORDS, reason="this transformers asks is_croppable first")
@pytest.mark.parametrize("kind", **named(EVICTING))
def test_recording_is_refused_where_nobody_asks_first(model, kind):
    cache = kind.make(model)
    with pytest.raises(ValueError, match=f"crop.*{NO_RECORDING}"):
        cache.activate_past_recording()


@pytest.mark.skipif(not RECORDS, reason=NO_RECORDING)
@pytest.mark.parametrize("kind", **named([k for k in EVICTING if k.records]))
def test_recording_the_past_allows_to_crop_what_would_have_been_dropped(model, kind):
    """Between `activate_past_recording` and `crop` nothing is dropped, so the tokens of a draft can be taken back."""
    ids, draft = models.tokens(1, 24), models.tokens(1, 4, seed=8)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        first = feed(model, cache, ids[:, :12], [12])
        cache.activate_past_recording()
        second = feed(model, cache, torch.cat([ids[:, 12:13], draft], dim=1), [5])[:, :1]
        cache.crop(-4)
        assert cache.get_seq_length() == 13
        assert cache.memory().tokens_kept == kind.kept(13, 12)
        third = feed(model, cache, ids[:, 13:], [11])
        cache.crop(0)
    assert cache.memory().tokens_kept == kind.kept(24, 12)
    assert tape.worst(kind.keeps) < LOGITS
    if kind.exact:
        result = torch.cat([first, second, third], dim=1)[0]
        assert torch.allclose(result, row_logits(model, ids[0], [12, 1, 11], kind.keeps), atol=LOGITS, rtol=0)


@pytest.mark.skipif(not RECORDS, reason=NO_RECORDING)
@pytest.mark.parametrize("kind", **named([k for k in EVICTING if not k.records]))
def test_a_policy_that_reads_queries_refuses_to_record(model, kind):
    ids, cache = models.tokens(1, 24), kind.make(model)
    with Tape(model, cache) as tape:
        feed(model, cache, ids[:, :12], [12])
        with pytest.raises(ValueError, match=READS_QUERIES):
            type(cache).activate_past_recording(cache)  # unrecorded: the replay must not record either
        feed(model, cache, ids[:, 12:], [1, 11])
    assert tape.worst(kind.keeps) < LOGITS


@pytest.mark.parametrize("kind", **named(KINDS))
def test_croppable_says_whether_a_rollback_is_always_possible(model, kind):
    assert kind.make(model).is_croppable is not kind.evicts


@pytest.mark.parametrize("kind", **named(KEEPING))
def test_prompt_lookup_attends_what_it_should(model, kind):
    """Drafts are cropped from every layer. Drafted tokens are seen exactly, so a quantised cache may choose otherwise
    than its own greedy decoding; what each layer answers is held against the reference."""
    prompt = models.tokens(1, 6).repeat(1, 3)
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        made = model.generate(
            prompt, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=24, do_sample=False
        )
    assert any(event[0] == "crop" and event[1] for event in tape.events)
    assert tape.worst(kind.keeps) < LOGITS
    if kind.exact:
        expected = models.tiny_llama().generate(prompt, max_new_tokens=24, do_sample=False)
        assert made.equal(expected)


@pytest.mark.parametrize("kind", **named(KEEPING))
def test_an_assistant_model(model, kind):
    prompt, assistant = models.tokens(1, 12), models.tiny_llama(seed=0, num_hidden_layers=1)
    assistant.generation_config.num_assistant_tokens = 4
    cache = kind.make(model)
    with Tape(model, cache) as tape:
        made = model.generate(
            prompt, past_key_values=cache, assistant_model=assistant, max_new_tokens=24, do_sample=False
        )
    assert any(event[0] == "crop" and event[1] for event in tape.events)
    assert tape.worst(kind.keeps) < LOGITS
    if kind.exact:
        assert made.equal(models.tiny_llama().generate(prompt, max_new_tokens=24, do_sample=False))


@pytest.mark.parametrize("kind", **named(EVICTING))
def test_assisted_decoding_refuses_a_cache_that_drops(model, kind):
    prompt = models.tokens(1, 6).repeat(1, 3)
    with pytest.raises(ValueError, match="crop"):
        model.generate(
            prompt, past_key_values=kind.make(model), prompt_lookup_num_tokens=3, max_new_tokens=24, do_sample=False
        )


def test_an_assistant_with_our_cache_beside_a_default_one():
    """A cache for the assistant alone: the main model's own tokens come out whatever the assistant drafts."""
    prompt, model = models.tokens(1, 12), models.tiny_llama()
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    assistant = models.tiny_llama(num_hidden_layers=1)
    cache = kvplug.DenseCache(model)
    kvplug.attach(assistant)
    made = model.generate(prompt, past_key_values=cache, assistant_model=assistant, max_new_tokens=20, do_sample=False)
    assert made.equal(expected)
