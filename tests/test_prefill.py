"""A prompt that is run once: for every way to go on from it, equal to what `generate` does by itself."""

import pytest
import torch

import kvplug
from tests import models
from tests.caches import ROOMY, named
from tests.oracles import LOGITS

WAYS = {
    "greedy": dict(do_sample=False),
    "beams": dict(num_beams=3, do_sample=False, num_return_sequences=3),
    "samples": dict(do_sample=True, num_return_sequences=3),
}


@pytest.fixture(scope="module")
def model():
    return models.tiny_llama()


def rows_of(way):
    return way.get("num_beams", way.get("num_return_sequences", 1))


def generate(model, ids, mask, cache, way):
    torch.manual_seed(7)
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, return_dict_in_generate=True,
        output_logits=True, **way,
    )  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", [lambda m: kvplug.PagedCache(m, 4), kvplug.DenseCache], ids=["paged", "dense"])
def test_what_follows_is_what_generate_gives(model, make, way, padded, chunk):
    if padded:
        _, ids, mask = models.left_padded([5, 12, 9])
    else:
        ids = models.tokens(2, 12)
        mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, kvplug.DenseCache(model), way)
    cache = kvplug.prefill(model, ids, make(model), rows_of(way), chunk, mask if padded else None)
    assert cache.get_seq_length() == ids.shape[1] - 1
    made = generate(model, ids, mask, cache, way)
    assert made.sequences.equal(expected.sequences)
    assert torch.allclose(torch.stack(made.logits), torch.stack(expected.logits), atol=LOGITS, rtol=0)


@pytest.mark.parametrize("kind", **named(ROOMY))
def test_chunks_under_every_policy_with_room(model, kind):
    ids = models.tokens(2, 30)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids))
    cache = kvplug.prefill(model, ids, kind.make(model), chunk=7)
    out = model.generate(
        ids, past_key_values=cache, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids)
    )
    assert out.equal(expected)


def test_what_was_seen_is_not_run_again(model):
    ids = models.tokens(1, 20)
    pool = kvplug.PagePool(model, 4)
    pool.keep(kvplug.prefill(model, ids, pool.open(ids)))
    seen = []
    hook = model.register_forward_pre_hook(lambda m, args: seen.append(args[0].shape[1]))
    kvplug.prefill(model, ids, pool.open(ids))
    kvplug.prefill(model, ids[:, :1], kvplug.DenseCache(model))
    hook.remove()
    assert seen == [3], "sixteen are known and the last one is left; of one token nothing is"


def test_a_wrapped_model_gets_its_positions(model):
    _, ids, mask = models.left_padded([5, 12])
    one, other = kvplug.PagedCache(model, 4), kvplug.PagedCache(model, 4)
    kvplug.prefill(torch.compile(model, backend="eager"), ids, one, attention_mask=mask)
    kvplug.prefill(model, ids, other, attention_mask=mask)
    real = mask[:, :-1].bool()
    for a, b in zip(one.layers, other.layers, strict=True):
        assert torch.allclose(a.keys.transpose(1, 2)[real], b.keys.transpose(1, 2)[real], atol=1e-5)


def test_rows_of_linear_attention(model):
    model = models.tiny_qwen3_next()
    ids = models.tokens(1, 9)
    options = dict(num_beams=3, do_sample=False, max_new_tokens=5, attention_mask=torch.ones_like(ids))
    cache = kvplug.prefill(model, ids, kvplug.DenseCache(model), rows=3)
    made = model.generate(ids, past_key_values=cache, **options)
    assert made.equal(model.generate(ids, past_key_values=kvplug.DenseCache(model), **options))


def test_a_share_of_the_prompt_is_not_one_of_a_chunk(model):
    cache = kvplug.KeyDiffCache(model, 0.5)
    with pytest.raises(ValueError, match=r"chunk=4 can't be had with budget=0.5"):
        kvplug.prefill(model, models.tokens(1, 20), cache, chunk=4)
    assert kvplug.prefill(model, models.tokens(1, 21), cache, chunk=20).memory().tokens_kept == 10


def test_a_bar_is_shown_on_request(model, capsys):
    kvplug.prefill(model, models.tokens(1, 9), kvplug.DenseCache(model), chunk=4)
    assert "prefill" not in capsys.readouterr().err
    kvplug.prefill(model, models.tokens(1, 9), kvplug.DenseCache(model), chunk=4, progress=True)
    assert "8/8" in capsys.readouterr().err


def test_what_is_refused_changes_nothing(model):
    ids = models.tokens(2, 9)
    cache = kvplug.prefill(model, ids, kvplug.DenseCache(model))
    for arguments, told in [
        ({"input_ids": ids[0]}, "input_ids=\\(9,\\) is not accepted"),
        ({"input_ids": ids[:, :8]}, "input_ids has 8 tokens, and the cache has seen 8"),
        ({"input_ids": models.tokens(1, 12)}, "has 1 rows"),
        ({"cache": None}, "cache=NoneType is not accepted"),
        ({"rows": 0}, "rows=0"),
        ({"chunk": 0}, "chunk=0"),
        ({"attention_mask": torch.ones(2, 8)}, "attention_mask=\\(2, 8\\) is not accepted"),
    ]:
        with pytest.raises(ValueError, match=told):
            kvplug.prefill(model, **{"input_ids": ids, "cache": cache, **arguments})
    assert cache.get_seq_length() == 8
