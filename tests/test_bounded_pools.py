"""Pools with a bound: what leaves first, what is told before anything is changed, and how little lies idle."""

import pytest
import torch

import kvplug
from kvplug.policies import Window
from tests import models
from tests.pools import PAGE, TOKEN, known


@pytest.fixture(scope="module")
def model():
    return models.tiny_llama()


def test_the_least_recently_used_prompt_leaves_first(model):
    pool = kvplug.PagePool(model, PAGE, max_bytes=11 * PAGE * TOKEN)
    prompts = [models.tokens(1, 17, seed=seed) for seed in range(3)]
    for ids in prompts[:2]:
        known(model, pool, ids)
    assert pool.open(prompts[0]).get_seq_length() == 16  # used again
    held = pool.open(prompts[1][:, :9])  # two of its pages are held
    known(model, pool, prompts[2])
    assert pool.open(prompts[0]).get_seq_length() == 16
    assert pool.open(prompts[2]).get_seq_length() == 16
    assert held.get_seq_length() == pool.open(prompts[1]).get_seq_length() == 8
    assert pool.nbytes <= pool.max_bytes
    pool.check()


def test_a_full_pool_says_so_before_anything_is_changed(model):
    pool = kvplug.PagePool(model, PAGE, max_bytes=6 * PAGE * TOKEN)
    cache, ids = kvplug.PagedCache(model, pool=pool), models.tokens(1, 30)
    with torch.no_grad():
        model(ids[:, :18], past_key_values=cache)
        before, held = [layer.keys.clone() for layer in cache.layers], pool.pages_held
        with pytest.raises(kvplug.OutOfPages, match=f"max_bytes={pool.max_bytes}.*more pages of 4,"):
            model(ids[:, 18:], past_key_values=cache)
        assert pool.pages_held == held
        assert cache.get_seq_length() == 18
        assert all(layer.keys.equal(x) for layer, x in zip(cache.layers, before, strict=True))
        # It goes on with what fits, and with more once somebody leaves.
        logits = model(ids[:, 18:24], past_key_values=cache).logits
        full = model(ids[:, :24]).logits[:, 18:]
    assert torch.allclose(logits, full, atol=1e-4)
    pool.check()


def test_layers_of_different_budgets_are_told_together(model):
    """The second layer's pages would not fit: then the first one's are not taken either."""
    pool = kvplug.PagePool(model, PAGE, max_bytes=4 * PAGE * TOKEN // 2)
    cache = kvplug.PagedCache(model, pool=pool, policy=[Window(4), Window(16)])
    with torch.no_grad(), pytest.raises(kvplug.OutOfPages):
        model(models.tokens(1, 20), past_key_values=cache)
    assert [layer.seen for layer in cache.layers] == [0, 0]
    assert pool.pages_held == 0


@pytest.mark.parametrize("lengths", [[512, 379, 259, 103], [2048, 1531, 1027, 410]])
def test_little_of_a_pool_is_idle(model, lengths):
    pool = kvplug.PagePool(model, 16)
    caches = []
    for length in lengths:
        caches.append(kvplug.PagedCache(model, pool=pool))
        states = torch.zeros(1, 2, length, 16)
        for layer in range(2):
            caches[-1].update(states, states, layer)
    used = sum(cache.memory().used for cache in caches)
    assert used == sum(lengths) * TOKEN
    assert 1 - used / pool.nbytes <= 0.04


def test_a_hybrid_whose_pool_is_full_goes_on_as_before(model):
    """Its first layers are windows, which take tokens before any page is asked for."""
    model = models.tiny_gpt_oss()
    pool = kvplug.PagePool(model, PAGE, max_bytes=3 * PAGE * TOKEN // 2)
    cache, ids = kvplug.PagedCache(model, pool=pool), models.tokens(1, 16)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=cache)
        with pytest.raises(kvplug.OutOfPages):
            model(ids[:, 12:13], past_key_values=cache)
        assert {layer.get_seq_length() for layer in cache.layers} == {12}
        pool.max_bytes = None
        logits = model(ids[:, 12:], past_key_values=cache).logits
        expected = model(ids).logits[:, 12:]
    assert torch.allclose(logits, expected, atol=1e-4)


def test_padding_that_is_told_late_finds_its_pages_first(model):
    pool = kvplug.PagePool(model, PAGE)
    cache = kvplug.PagedCache(model, pool=pool, policy=Window(16))
    mask = torch.ones(4, 12, dtype=torch.long)
    mask[1, 8:10] = 0
    with torch.no_grad():
        model(models.tokens(1, 8), past_key_values=cache)
        cache.batch_repeat_interleave(4)
        pool.max_bytes = 6 * PAGE * TOKEN
        with pytest.raises(kvplug.OutOfPages):
            model(models.tokens(4, 4), past_key_values=cache, attention_mask=mask)
    assert [(layer.seen, layer.store.length) for layer in cache.layers] == [(8, 8)] * 2


def test_a_page_that_held_ones_go_on_from_is_not_counted_on(model):
    """The beginning is known by the pages of one cache, which died, and goes on in those of another, which lives."""
    pool = kvplug.PagePool(model, PAGE)
    ids = models.tokens(1, 17)
    one, other = kvplug.PagedCache(model, pool=pool), kvplug.PagedCache(model, pool=pool)
    with torch.no_grad():
        model(ids[:, :8], past_key_values=one)
        model(ids, past_key_values=other)
        pool.keep(one, ids)
        pool.keep(other, ids)
        del one
        assert pool.prefixes.forgettable == []
        pool.max_bytes = pool.pages_held * PAGE * TOKEN
        with pytest.raises(kvplug.OutOfPages):
            model(models.tokens(1, 9, seed=2), past_key_values=kvplug.PagedCache(model, pool=pool))
    assert pool.nbytes <= pool.max_bytes + 3 * PAGE * TOKEN
    assert pool.open(ids).get_seq_length() == 16
    pool.check()


def test_what_cannot_fit_forgets_nothing(model):
    pool = kvplug.PagePool(model, PAGE, max_bytes=20 * PAGE * TOKEN)
    known(model, pool, models.tokens(1, 17))
    with pytest.raises(kvplug.OutOfPages), torch.no_grad():
        model(models.tokens(1, 400), past_key_values=kvplug.PagedCache(model, pool=pool))
    assert pool.open(models.tokens(1, 17)).get_seq_length() == 16


def test_what_one_kind_of_layers_left_another_can_have(model):
    """Pages that are free among those of all tokens make room for those of a window."""
    pool = kvplug.PagePool(model, PAGE, max_bytes=50 * PAGE * TOKEN)
    small, big = (kvplug.PagedCache(model, pool=pool) for _ in range(2))
    with torch.no_grad():
        model(models.tokens(1, 3), past_key_values=small)
        model(models.tokens(1, 190), past_key_values=big)
        del big
        model(models.tokens(1, 9), past_key_values=kvplug.PagedCache(model, pool=pool, policy=Window(12)))
    assert pool.nbytes <= pool.max_bytes
    pool.check()


def test_spare_pages_of_one_arena_leave_room_for_the_next(model):
    pool = kvplug.PagePool(model, PAGE, max_bytes=2 * PAGE * TOKEN)
    cache = kvplug.PagedCache(model, pool=pool, policy=[Window(12), None])
    x = torch.zeros(1, 2, 1, 16)
    for layer in range(2):
        cache.update(x, x, layer)
    assert pool.nbytes <= pool.max_bytes
