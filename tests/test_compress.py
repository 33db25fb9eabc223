"""A context that is compressed without seeing a question: what is kept against transformers' own attention weights, and
what questions then read against a whole forward in which each head sees only what it kept.
"""

import copy

import pytest
import torch
from transformers import DynamicCache

import kvplug
from kvplug.codecs import Rotated
from tests import models
from tests.compress_oracles import HEADS, LAYERS, chosen, masked, most_attention
from tests.oracles import LOGITS, SAME_KERNEL, feed
from tests.walker import bytes_held

CONTEXT, SINKS, RECENT = 40, 2, 3


@pytest.fixture
def ids():
    return models.tokens(1, CONTEXT)


@pytest.fixture
def question():
    return models.tokens(1, 12, seed=5)


def compress(model, ids, budget=0.25, **settings):
    return kvplug.compress(model, ids, budget, **{"sinks": SINKS, "recent": RECENT, **settings})


def kept(cache):
    """Tokens of the context that each head of each layer holds, as `chosen` gives them."""
    found = []
    for layer in cache.layers:
        context = layer.store.context
        at, owners = context.positions[0, 0], context.slot_owners[0]
        found.append([sorted(at[(owners == head) & (at >= 0)].tolist()) for head in range(HEADS)])
    return found


# What is kept


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.25, 0.9, 1, 7, 39], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_kept_is_what_brute_force_chooses(model, budget, seed):
    ids = models.tokens(1, CONTEXT, seed=seed)
    mean = budget if isinstance(budget, int) else max(int(budget * CONTEXT), 1)
    assert kept(compress(model, ids, budget)) == chosen(most_attention(ids), mean, SINKS, RECENT)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"chunk": 7}, {}),
        ({"chunk": 16}, {}),
        ({"chunk": 1}, {}),
        ({"chunk": 40}, {}),
        ({"instruction": True}, {}),
        ({"chunk": 16, "instruction": True}, {}),
        ({}, {"sinks": 0}),
        ({}, {"sinks": 7}),
        ({}, {"sinks": 0, "recent": 0}),
        ({}, {"recent": 10}),
        ({}, {"recent": 30}),
    ],
    ids=[
        "chunks_of_7",
        "chunks_of_16",
        "one_by_one",
        "exact",
        "instruction",
        "instruction_and_chunks",
        "no_sinks",
        "all_sinks",
        "nothing_for_sure",
        "all_recent",
        "more_recent_than_there_is_room_for",
    ],
)
def test_chunks_instructions_and_tokens_that_stay(model, ids, settings, told):
    spoken = models.tokens(1, 5, seed=9) if settings.get("instruction") else None
    chunk = settings.get("chunk")
    own = {"chunk": chunk} if chunk else {}
    found = kept(compress(model, ids, 10, instruction_ids=spoken, **own, **told))
    assert found == chosen(most_attention(ids, chunk, spoken), 10, **{"sinks": SINKS, "recent": RECENT, **told})


def test_heads_and_layers_keep_different_numbers(model, ids):
    assert len({len(head) for layer in kept(compress(model, ids)) for head in layer}) > 1


def test_more_tokens_than_there_are_keep_all(model, ids):
    assert kept(compress(model, ids, 1000)) == [[list(range(CONTEXT))] * HEADS] * LAYERS


# What a question reads


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 6]], ids=["at_once", "one_by_one", "mixed"])
def test_the_whole_budget_answers_as_the_full_cache_does(model, ids, question, chunks):
    whole = torch.cat([ids, question], 1)
    expected = feed(models.tiny_llama(), DynamicCache(), whole, [CONTEXT, *chunks])[:, CONTEXT:]
    cache = compress(model, ids, 1.0)
    assert cache.get_seq_length() == CONTEXT
    assert torch.allclose(feed(model, cache, question, chunks), expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("chunks", [[12], [1] * 12, [5, 1, 6]], ids=["at_once", "one_by_one", "mixed"])
@pytest.mark.parametrize("budget", [1, 0.25, 0.6], ids=str)
def test_a_question_sees_what_each_head_kept_and_all_later_tokens(model, ids, question, budget, chunks):
    cache = compress(model, ids, budget)
    expected = masked(torch.cat([ids, question], 1), CONTEXT, kept(cache))
    assert torch.allclose(feed(model, cache, question, chunks), expected, atol=LOGITS, rtol=0)
    assert cache.get_seq_length() == CONTEXT + 12
    mean = budget if isinstance(budget, int) else int(budget * CONTEXT)
    assert cache.memory().tokens_kept == mean + 12


def test_a_head_may_leave_a_part_of_its_last_page_empty(model, question):
    ids = models.tokens(1, 300)
    cache = compress(model, ids, 0.5)
    assert [layer.store.context.page for layer in cache.layers] == [4, 4]
    assert any(len(head) % 4 for layer in kept(cache) for head in layer)
    assert kept(cache) == chosen(most_attention(ids), 150, SINKS, RECENT)
    expected = masked(torch.cat([ids, question], 1), 300, kept(cache))
    assert torch.allclose(feed(model, cache, question, [5, 1, 6]), expected, atol=LOGITS, rtol=0)


def test_generate_takes_the_ids_of_context_and_question(model, ids, question):
    cache, whole = compress(model, ids), torch.cat([ids, question], 1)
    heads = kept(cache)
    made = model.generate(whole, past_key_values=cache, max_new_tokens=10, do_sample=False)
    logits = masked(made[:, :-1], CONTEXT, heads)[:, 11:]
    assert made[0, 52:].equal(logits[0].argmax(-1))


def test_questions_of_several_lengths_in_a_padded_batch(model, ids):
    rows, padded, mask = models.left_padded([5, 12, 1], seed=20)
    cache = compress(model, ids)
    alone = [feed(model, copy.deepcopy(cache), row, [row.shape[1]]) for row in rows]
    cache.batch_repeat_interleave(3)
    mask = torch.cat([torch.ones(3, CONTEXT, dtype=torch.long), mask], 1)
    logits = feed(model, cache, padded, [12], mask)
    for row, expected in enumerate(alone):
        own = expected.shape[1]
        assert torch.allclose(logits[row, 12 - own :], expected[0], atol=SAME_KERNEL, rtol=0)


# Going back


def test_a_second_question_after_a_reset_is_as_on_a_fresh_copy(model, ids, question):
    cache = compress(model, ids)
    fresh, before = copy.deepcopy(cache), cache.memory()
    feed(model, cache, models.tokens(1, 9, seed=7), [4, 5])
    cache.reset()
    assert cache.get_seq_length() == CONTEXT
    assert cache.memory() == before
    assert kept(cache) == kept(fresh)
    assert feed(model, cache, question, [12]).equal(feed(model, fresh, question, [12]))


def test_a_reset_ends_a_batch_and_a_recording(model, ids, question):
    cache = compress(model, ids)
    fresh, before = copy.deepcopy(cache), cache.memory()
    cache.batch_repeat_interleave(3)
    cache.activate_past_recording()
    _, padded, mask = models.left_padded([5, 9, 1])
    feed(model, cache, padded, [9], torch.cat([torch.ones(3, CONTEXT, dtype=torch.long), mask], 1))
    cache.reset()
    assert cache.memory() == before
    assert feed(model, cache, question, [12]).equal(feed(model, fresh, question, [12]))


@pytest.mark.parametrize("chunks", [[9], [1] * 9], ids=["at_once", "one_by_one"])
def test_cropped_tokens_were_never_there(model, ids, question, chunks):
    cache = compress(model, ids)
    fresh = copy.deepcopy(cache)
    feed(model, cache, models.tokens(1, 9, seed=7), chunks)
    cache.crop(-9)
    assert cache.get_seq_length() == CONTEXT
    feed(model, cache, question[:, :6], [6])
    feed(model, cache, models.tokens(1, 3, seed=8), [3])
    cache.crop(-3)
    assert cache.get_seq_length() == CONTEXT + 6
    expected = feed(model, fresh, question, [6, 6])[:, 6:]
    assert torch.allclose(feed(model, cache, question[:, 6:], [6]), expected, atol=SAME_KERNEL, rtol=0)


def test_a_crop_into_the_context_raises_and_changes_nothing(model, ids, question):
    cache = compress(model, ids)
    feed(model, cache, question, [12])
    before = cache.memory()
    with pytest.raises(ValueError, match=r"tokens_to_remove=-13.*context of 40 tokens.*-12 to 0"):
        cache.crop(-13)
    with pytest.raises(ValueError, match=r"tokens_to_remove=1 .*accepted"):
        cache.crop(1)
    assert cache.memory() == before
    assert cache.get_seq_length() == CONTEXT + 12


def test_a_recorded_draft_is_taken_back(model, ids, question):
    cache = compress(model, ids)
    assert cache.is_croppable
    fresh = copy.deepcopy(cache)
    cache.activate_past_recording()
    feed(model, cache, torch.cat([question[:, :6], models.tokens(1, 3, seed=8)], 1), [9])
    cache.crop(-3)
    expected = feed(model, fresh, question, [6, 6])[:, 6:]
    assert torch.allclose(feed(model, cache, question[:, 6:], [6]), expected, atol=SAME_KERNEL, rtol=0)


# Rows


def scores_of(model, cache, made, prompt):
    """Log probabilities that `cache` gives to the tokens `made` `[tokens]` after the first `prompt`."""
    logits = feed(model, cache, made[None, CONTEXT:-1], [prompt - CONTEXT] + [1] * (len(made) - prompt - 1))
    chances = logits[0, prompt - CONTEXT - 1 :].log_softmax(-1)
    return chances.gather(-1, made[prompt:, None])[:, 0]


def test_several_sequences_of_a_sample(model, ids, question):
    cache, whole = compress(model, ids), torch.cat([ids, question], 1)
    fresh = copy.deepcopy(cache)
    cache.batch_repeat_interleave(3)
    made = model.generate(
        whole,
        past_key_values=cache,
        num_return_sequences=3,
        do_sample=True,
        top_k=0,
        max_new_tokens=8,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert len({tuple(row) for row in made.sequences.tolist()}) > 1
    for row, tokens in enumerate(made.sequences):
        told = torch.stack([step[row] for step in made.logits]).log_softmax(-1)
        own = told.gather(-1, tokens[52:, None])[:, 0]
        assert torch.allclose(own, scores_of(model, copy.deepcopy(fresh), tokens, 52), atol=LOGITS, rtol=0)


def test_beams_score_their_own_sequences(model, ids, question):
    cache, whole = compress(model, ids), torch.cat([ids, question], 1)
    fresh = copy.deepcopy(cache)
    cache.batch_repeat_interleave(4)
    made = model.generate(
        whole,
        past_key_values=cache,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        max_new_tokens=8,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    for tokens, score in zip(made.sequences, made.sequences_scores, strict=True):
        assert abs(scores_of(model, copy.deepcopy(fresh), tokens, 52).sum() - score) < 1e-3


# Bytes


@pytest.mark.parametrize("codec", [None, "int4", "int8", "fp8", ("int8", "int4")], ids=str)
def test_the_report_is_what_is_held_and_falls_with_the_budget(model, ids, question, codec):
    totals = []
    for budget in (1.0, 0.5, 0.25, 0.1):
        cache = compress(model, ids, budget, codec=codec)
        assert cache.memory().total == bytes_held(cache)
        assert cache.memory().tokens_kept == int(budget * CONTEXT)
        assert cache.memory().tokens_seen == CONTEXT
        totals.append(cache.memory().total)
        feed(model, cache, question, [11, 1])
        assert cache.memory().total == bytes_held(cache)
        cache.batch_repeat_interleave(2)
        assert cache.memory().total == bytes_held(cache)
        cache.reset()
        assert cache.memory().total == bytes_held(cache) == totals[-1]
    assert totals == sorted(set(totals), reverse=True)


def test_half_of_a_long_context_is_half_of_the_bytes(model):
    """Pages that are not full, and the table of positions, are little beside it."""
    ids = models.tokens(1, 1000)
    full = 1000 * 2 * 2 * 2 * 16 * 4
    share = compress(model, ids, 0.5, chunk=200).memory().total / full
    assert 0.5 < share < 0.55


def test_codes_are_those_of_the_context(model, ids):
    """All that is kept of the first layer, whose keys no attention has touched, is encoded token by token."""
    dense, coded = compress(model, ids, 1.0), compress(model, ids, 1.0, codec="int4")
    codecs = Rotated(4, None, unbiased=True), Rotated(4, None)
    for side, codec in zip(("keys", "values"), codecs, strict=True):
        plain = getattr(dense.layers[0], side)
        assert getattr(coded.layers[0], side).equal(codec.decode(codec.encode(plain), torch.float32))


def test_a_codec_changes_no_choice_and_answers_nearly_alike(model, ids, question):
    plain, coded = compress(model, ids), compress(model, ids, codec="int8")
    assert kept(plain) == kept(coded) == kept(compress(model, ids, codec="int4"))
    expected, found = feed(model, plain, question, [12]), feed(model, coded, question, [12])
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).min() > 0.99


# Other layers than full attention


def test_sliding_layers_are_as_after_one_reading():
    """And so they are in spite of the repetition, in chunks too; full layers keep all at a budget of 1.0."""
    model, ids, more = models.tiny_gemma3(), models.tokens(1, CONTEXT), models.tokens(1, 12, seed=5)
    read = DynamicCache(config=model.config)
    feed(model, read, ids, [CONTEXT])
    cache = compress(models.tiny_gemma3(), ids, 0.25, chunk=16)
    for ours, theirs in list(zip(cache.layers, read.layers, strict=True))[::2]:
        assert torch.allclose(ours.keys[:, :, -7:], theirs.keys[:, :, -7:], atol=SAME_KERNEL, rtol=0)
        assert ours.get_seq_length() == CONTEXT
    expected = feed(model, read, more, [1, 11])
    routed = models.tiny_gemma3()
    found = feed(routed, compress(routed, ids, 1.0, chunk=16), more, [1, 11])
    assert torch.allclose(found, expected, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("make", [models.tiny_gemma3, models.tiny_qwen3_next], ids=["sliding", "linear"])
def test_a_reset_refuses_where_other_layers_cant_go_back(make):
    model, ids, more = make(), models.tokens(1, CONTEXT), models.tokens(1, 12, seed=5)
    cache = compress(model, ids)
    fresh = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=r"reset\(\) can't take.*copy.deepcopy\(cache\).*accepted"):
        cache.reset()
    assert cache.get_seq_length() == CONTEXT
    assert feed(model, cache, more, [12]).equal(feed(model, fresh, more, [12]))


@pytest.mark.parametrize(
    "make",
    [models.tiny_gemma2, models.tiny_gpt_oss, models.tiny_gemma3n, models.tiny_qwen3_next, models.tiny_glm],
    ids=["soft_capped", "learned_sinks", "shared_layers", "linear", "interleaved_rope"],
)
def test_the_whole_budget_on_other_models(make):
    ids, more = models.tokens(1, CONTEXT), models.tokens(1, 6, seed=5)
    plain, model = make(), make()
    read = DynamicCache(config=plain.config)
    feed(plain, read, ids, [CONTEXT])
    expected = feed(plain, read, more, [1, 5] if make is not models.tiny_qwen3_next else [1] * 6)
    cache = compress(model, ids, 1.0)
    found = feed(model, cache, more, [1, 5] if make is not models.tiny_qwen3_next else [1] * 6)
    assert torch.allclose(found, expected, atol=LOGITS, rtol=0)
    assert compress(model, ids, 0.25).memory().total < cache.memory().total


# Errors

WRONG = {
    "budget_zero": (dict(budget=0), ["budget=0", "at least 1"]),
    "budget_true": (dict(budget=True), ["budget=True"]),
    "share_zero": (dict(budget=0.0), ["budget=0.0", "above 0"]),
    "share_above_one": (dict(budget=1.5), ["budget=1.5", "1.0"]),
    "budget_text": (dict(budget="all"), ["budget='all'"]),
    "method": (dict(method="h2o"), ["method='h2o'", "kvzip"]),
    "sinks": (dict(sinks=-1), ["sinks=-1", "0"]),
    "recent": (dict(recent=-1), ["recent=-1", "0"]),
    "chunk": (dict(chunk=0), ["chunk=0", "1"]),
    "codec": (dict(codec="zip"), ["codec", "zip", "int4"]),
    "several_contexts": (dict(input_ids=torch.ones(2, 5, dtype=torch.long)), ["input_ids", "(2, 5)", "[1, tokens]"]),
    "flat_context": (dict(input_ids=torch.ones(5, dtype=torch.long)), ["input_ids", "(5,)", "[1, tokens]"]),
    "empty_context": (dict(input_ids=torch.ones(1, 0, dtype=torch.long)), ["input_ids", "(1, 0)", "[1, tokens]"]),
    "flat_instruction": (dict(instruction_ids=torch.ones(5, dtype=torch.long)), ["instruction_ids", "(5,)"]),
}


@pytest.mark.parametrize(("settings", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument(model, ids, settings, words):
    with pytest.raises(ValueError) as error:
        kvplug.compress(model, **{"input_ids": ids, "budget": 0.25, **settings})
    for word in words:
        assert word in str(error.value)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("model", ["a/name", models.tiny_llama().config], ids=["name", "config"])
def test_what_is_no_model(ids, model):
    with pytest.raises(ValueError, match=f"model={type(model).__name__} is not accepted"):
        kvplug.compress(model, ids, 0.25)


@pytest.mark.parametrize(
    "make", [models.tiny_bloom, models.tiny_falcon, models.tiny_deepseek], ids=["bloom", "falcon", "deepseek"]
)
def test_a_model_whose_attention_cant_be_watched(ids, make):
    with pytest.raises(ValueError, match=f"model={make().__class__.__name__}.*attention.*accepted"):
        kvplug.compress(make(), ids, 0.25)
