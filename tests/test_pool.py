"""A pool of pages from outside: what is shared and what it weighs, prompts that are remembered, and what is refused."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import kvplug
from kvplug.policies import HeavyHitters, Window
from tests import models
from tests.pools import PAGE, TOKEN, greedy, known


@pytest.fixture(scope="module")
def model():
    return models.tiny_llama()


@pytest.mark.parametrize("codec", [None, "int8", "int4"])
@pytest.mark.parametrize("tokens", [PAGE + 1, 20, 21, 23])
def test_a_known_prompt_goes_on_to_the_same_tokens(model, tokens, codec):
    pool = kvplug.PagePool(model, PAGE, codec)
    first = models.tokens(1, 20)
    known(model, pool, first)
    ids = torch.cat([first, models.tokens(1, 5, seed=3)], dim=1)[:, :tokens]
    cache = pool.open(ids)
    assert cache.get_seq_length() == min((tokens - 1) // PAGE, 5) * PAGE
    fresh = kvplug.PagedCache(model, PAGE, codec=codec)
    out = greedy(model, ids, cache)
    if codec is None:
        assert out.equal(greedy(model, ids, kvplug.DenseCache(model)))
    else:
        # A prompt's own attention reads what is not encoded yet: held against one that comes in the same two parts.
        split = (tokens - 1) // PAGE * PAGE
        model(ids[:, :split], past_key_values=fresh)
        assert out.equal(greedy(model, ids, fresh))
    pool.check()


def test_each_row_finds_its_own_beginning(model):
    pool = kvplug.PagePool(model, PAGE)
    one, other = models.tokens(1, 24), models.tokens(1, 24, seed=5)
    known(model, pool, one)
    known(model, pool, other[:, :16])
    ids = torch.cat([other, one])
    cache = pool.open(ids)
    assert cache.get_seq_length() == 16, "as far as the row of which least is known"
    assert greedy(model, ids, cache).equal(greedy(model, ids, kvplug.DenseCache(model)))
    pool.check()


def test_padding_is_part_of_what_is_known(model):
    _, ids, mask = models.left_padded([9, 14, 14])
    pool = kvplug.PagePool(model, PAGE)
    known(model, pool, ids, mask)
    cache = pool.open(ids, mask)
    assert cache.get_seq_length() == 12
    assert greedy(model, ids, cache, mask=mask).equal(greedy(model, ids, kvplug.DenseCache(model), mask=mask))
    assert pool.open(ids).get_seq_length() == 0, "the same tokens, one row of them without padding"
    assert pool.open(ids[1:]).get_seq_length() == 12


def test_padding_is_remembered_with_what_was_generated(model):
    _, ids, mask = models.left_padded([9, 14])
    pool = kvplug.PagePool(model, PAGE)
    cache = pool.open(ids, mask)
    out = greedy(model, ids, cache, mask=mask)
    pool.keep(cache, out)
    assert pool.open(ids).get_seq_length() == 0
    longer = torch.cat([mask, mask.new_ones(2, out.shape[1] - 14)], dim=1)
    cache = pool.open(out, longer)
    assert cache.get_seq_length() == 16
    assert greedy(model, out, cache, mask=longer).equal(greedy(model, out, kvplug.DenseCache(model), mask=longer))


def test_padding_of_a_prompt_that_was_cropped_away_is_forgotten(model):
    _, ids, mask = models.left_padded([9, 14])
    pool = kvplug.PagePool(model, PAGE)
    cache = pool.open(ids, mask)
    greedy(model, ids, cache, mask=mask)
    cache.crop(-cache.get_seq_length())
    other = models.tokens(2, 14, seed=8)
    greedy(model, other, cache)
    pool.keep(cache, other)
    assert pool.open(other).get_seq_length() == 12


def test_equal_prompts_of_different_padding_need_their_mask(model):
    ids = models.tokens(1, 12).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    pool = kvplug.PagePool(model, PAGE)
    cache = pool.open(ids, mask)
    greedy(model, ids, cache, mask=mask)
    with pytest.raises(ValueError, match="attention_mask=None does not tell"):
        pool.keep(cache, ids)
    pool.keep(cache, ids, mask)
    assert pool.open(ids, mask).get_seq_length() == 8


def test_the_prompt_of_beams_is_kept_by_its_ids_alone(model):
    ids = models.tokens(2, 14)
    pool = kvplug.PagePool(model, PAGE)
    cache = kvplug.prefill(model, ids, pool.open(ids), rows=3)
    beams = dict(num_beams=3, do_sample=False, max_new_tokens=6, attention_mask=torch.ones_like(ids))
    model.generate(ids, past_key_values=cache, **beams)
    pool.keep(cache, ids)
    assert pool.open(ids).get_seq_length() == 12
    assert greedy(model, ids, pool.open(ids)).equal(greedy(model, ids, kvplug.DenseCache(model)))


def test_a_page_of_the_same_tokens_elsewhere_is_another_page(model):
    pool = kvplug.PagePool(model, PAGE)
    ids = torch.full((1, 17), 7)
    known(model, pool, ids)
    held = pool.pages_held
    assert held == 4, "four pages of the same four tokens, each after others"
    assert pool.open(ids[:, :9]).get_seq_length() == 8
    known(model, pool, torch.cat([torch.tensor([[3]]), ids], dim=1))
    assert pool.pages_held == held + 4


def test_ids_whose_hashes_are_equal_are_told_apart(model):
    pool = kvplug.PagePool(model, PAGE)
    assert hash((-1, 5)) == hash((-2, 5))
    cache = kvplug.PagedCache(model, pool=pool)
    model(models.tokens(1, 8), past_key_values=cache)
    page = cache.layers[0].store.pages.pages[0, 0].item()
    pool.prefixes.add([-1, 5, 5, 5], 0, [page])
    assert pool.prefixes.find([-2, 5, 5, 5], 0, 1) == []
    assert pool.prefixes.find([-1, 5, 5, 5], 0, 1) == [page]


def test_rows_from_one_prompt_weigh_one_prompt(model):
    """Four beams hold the prompt once, and each its own tail of less than two pages and what it wrote."""
    ids, new = models.tokens(1, 41), 12
    cache = kvplug.prefill(model, ids, kvplug.PagedCache(model, PAGE), rows=4)
    assert cache.memory().total == kvplug.plan(model.config, f"paged:page_size={PAGE}", 40).total
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, num_beams=4, max_new_tokens=new,
        do_sample=False,
    )  # fmt: skip
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=kvplug.DenseCache(model), num_beams=4,
        max_new_tokens=new, do_sample=False,
    )  # fmt: skip
    assert out.equal(expected)
    assert cache.memory().used <= (40 + 4 * (new + PAGE)) * TOKEN
    cache.pool.check()


def test_prompts_of_a_batch_that_beams_share_are_read_where_they_lie(model):
    """Two prompts, three beams each: the prompts are two rows of one view, not six that are gathered."""
    ids = models.tokens(2, 401)
    cache = kvplug.prefill(model, ids, kvplug.PagedCache(model, 16), rows=3)
    cache.batch_select_indices(torch.tensor([2, 0, 1, 5, 4, 3]))
    with torch.no_grad():
        model(models.tokens(6, 1), past_key_values=cache)
    part, *tail = cache.layers[0].store.parts()
    store = part.keys.fields["codes"]
    assert store.shape[0] == part.sharing.rows == 2
    assert (
        store.untyped_storage().data_ptr() == cache.layers[0].store.keys.buffers["codes"].untyped_storage().data_ptr()
    )
    assert sum(x.keys.tokens for x in tail) < 32


def test_rows_side_by_side_are_read_without_a_gather(model):
    """A batch of prompts, one row or several, and many decoded tokens: most of it is a view of the buffer."""
    for rows in (1, 3):
        cache = kvplug.PagedCache(model, 16)
        with torch.no_grad():
            model(models.tokens(rows, 600), past_key_values=cache)
            for _ in range(40):
                model(models.tokens(rows, 1), past_key_values=cache)
        buffer = cache.layers[0].store.keys.buffers["codes"].untyped_storage().data_ptr()
        parts = [x.keys.fields["codes"] for x in cache.layers[0].store.parts()]
        views = sum(x.shape[2] for x in parts if x.untyped_storage().data_ptr() == buffer)
        assert views == 640 if rows == 1 else views >= 592


def test_a_copy_of_a_cache_shares_its_pages_until_it_writes(model):
    cache = kvplug.PagedCache(model, PAGE)
    ids = models.tokens(1, 22)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        fork = copy.deepcopy(cache)
        assert cache.pool.pages_held == 6
        assert fork.pool is cache.pool
        one = [model(torch.tensor([[5]]), past_key_values=x).logits for x in (cache, fork)]
        assert cache.pool.pages_held == 7, "the last page of one of them"
        two = model(torch.tensor([[9]]), past_key_values=fork).logits
        full = model(torch.cat([ids, torch.tensor([[5, 9]])], dim=1)).logits
    assert torch.allclose(one[0][:, -1], full[:, -2], atol=1e-4)
    assert torch.allclose(two[:, -1], full[:, -1], atol=1e-4)
    del fork
    assert cache.pool.pages_held == 6
    cache.pool.check()


def test_what_dies_gives_its_pages_back(model):
    pool = kvplug.PagePool(model, PAGE)
    caches = [kvplug.PagedCache(model, pool=pool) for _ in range(3)]
    for seed, cache in enumerate(caches):
        greedy(model, models.tokens(2, 9, seed=seed), cache)
    assert pool.pages_held == 3 * 2 * 4
    caches[0].reset()
    assert pool.pages_held == 2 * 2 * 4
    caches.clear()
    del cache
    assert pool.pages_held == 0
    assert pool.nbytes == 0


def test_what_a_pool_refuses(model):
    pool = kvplug.PagePool(model, PAGE, "int8")
    for arguments, told in [
        ({"page_size": 8, "pool": pool}, "page_size=8 is not that of the pool; 4"),
        ({"codec": "int4", "pool": pool}, "codec='int4' is not that of the pool, \\(int8, int8\\)"),
        ({"pool": 3}, "pool=3 is not accepted"),
        ({"page_size": 0}, "page_size=0 is not valid"),
        ({"page_size": 2.5}, "page_size=2.5 is not valid"),
        ({"policy": HeavyHitters(8, heads="adaptive")}, "heads='adaptive' can't be had in pages"),
    ]:
        with pytest.raises(ValueError, match=told):
            kvplug.PagedCache(model, **arguments)
    with pytest.raises(ValueError, match="residual=4 can't be had in pages"):
        kvplug.from_spec("int4:residual=4+paged", model)
    with pytest.raises(ValueError, match="max_bytes=0"):
        kvplug.PagePool(model, max_bytes=0)
    with pytest.raises(ValueError, match="'pages' is not an argument of 'paged'; accepted: page_size"):
        kvplug.from_spec("paged:pages=3", model)


def test_what_cannot_be_kept_or_opened(model):
    pool = kvplug.PagePool(model, PAGE)
    ids = models.tokens(2, 9)
    other, evicting = kvplug.PagedCache(model, PAGE), kvplug.PagedCache(model, pool=pool, policy=Window(8))
    with pytest.raises(ValueError, match="not one of this pool"):
        pool.keep(other, ids)
    with pytest.raises(ValueError, match="drops tokens"):
        pool.keep(evicting, ids)
    cache = pool.open(ids)
    greedy(model, ids, cache)
    with pytest.raises(ValueError, match="input_ids has 1 rows, and the cache has 2"):  # of two prompts
        pool.keep(cache, ids[:1])
    cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(ValueError, match="input_ids=None is for a cache of open"):
        pool.keep(cache)
    pool.keep(cache, ids.flip(0))
    assert pool.open(ids).get_seq_length() == 8
    for bad in (ids[0], ids[:, :0], [[1, 2]]):
        with pytest.raises(ValueError, match="input_ids="):
            pool.open(bad)
    with pytest.raises(ValueError, match="padding on the left is accepted"):
        pool.open(ids, torch.tensor([[1] * 8 + [0]] * 2))
    hybrid = models.tiny_gemma2()
    with pytest.raises(ValueError, match=r"layer 0 .* keeps a window or a state"):
        kvplug.PagePool(hybrid).open(ids)


def test_two_models_do_not_share_a_pool(model):
    pool = kvplug.PagePool(model, PAGE)
    cache = kvplug.PagedCache(model, pool=pool)
    greedy(model, models.tokens(1, 5), cache)
    wider = models.tiny_llama(num_key_value_heads=4)
    for other in (wider, models.tiny_llama(seed=4), models.tiny_llama(num_hidden_layers=3)):
        with pytest.raises(ValueError, match="is of another model"):
            kvplug.PagedCache(other, pool=pool)
    mine = kvplug.PagedCache(model, pool=pool)
    half = torch.zeros(1, 2, 3, 16, dtype=torch.bfloat16)
    held = pool.pages_held
    with pytest.raises(ValueError, match="one pool is for one model in one dtype"):
        mine.update(half, half, 0)
    assert (pool.pages_held, mine.layers[0].shape) == (held, None)
    pool.check()


def test_a_pool_goes_over_to_another_dtype_only_when_nobody_is_left(model):
    pool = kvplug.PagePool(model.config, PAGE)
    one, other = kvplug.PagedCache(model.config, pool=pool), kvplug.PagedCache(model.config, pool=pool)
    full, half = torch.ones(1, 2, 5, 16), torch.ones(1, 2, 5, 16, dtype=torch.bfloat16)
    for layer in range(2):
        one.update(full, full, layer)
    one.crop(-5)
    for layer in range(2):
        other.update(half, half, layer)
    with pytest.raises(ValueError, match="one pool is for one model in one dtype"):
        one.update(full, full, 0)
    assert one.get_seq_length() == 0


def loud(cache, size, seed=0, tokens=10):
    generator = torch.Generator().manual_seed(seed)
    for layer in range(2):
        keys, values = (torch.randn(1, 2, tokens, 16, generator=generator) for _ in range(2))
        keys[..., 3] += size
        cache.update(keys, values, layer)
    for layer in cache.layers:
        layer.settle()


def test_loud_keys_in_a_pool_of_few_bits_are_told(model, tmp_path):
    pool = kvplug.PagePool(model, PAGE, "int4")
    one = kvplug.PagedCache(model, pool=pool)
    loud(one, 0)
    before = one.layers[0].keys.clone()
    with pytest.warns(UserWarning, match="the keys of layer 0 have channels so large"):
        loud(kvplug.PagedCache(model, pool=pool), 500)
    alone = kvplug.PagedCache(model, PAGE, codec="int4")
    loud(alone, 500)
    assert alone.layers[0].store.kept_plain
    alone.save(tmp_path / "x")
    with pytest.raises(ValueError, match="keys in full precision"):
        kvplug.load(tmp_path / "x", model, pool=pool)
    assert one.layers[0].keys.equal(before)
    pool.check()


def test_forks_in_inference_mode(model):
    with torch.inference_mode():
        cache = kvplug.prefill(model, models.tokens(1, 10), kvplug.PagedCache(model, PAGE))
        fork = copy.deepcopy(cache)
        out = greedy(model, models.tokens(1, 10), fork)
        back = pickle.loads(pickle.dumps(cache))
        assert greedy(model, models.tokens(1, 10), back).equal(out)
        assert greedy(model, models.tokens(1, 10), cache).equal(out)


def test_gradients_over_shared_pages(model):
    ids, new = models.tokens(1, 400), models.tokens(2, 3)

    def gradient(cache):
        kvplug.prefill(model, ids, cache, rows=2)
        embedded = model.model.embed_tokens(new).detach().requires_grad_()
        model(inputs_embeds=embedded[:, :1], past_key_values=cache).logits.square().sum().backward()
        return embedded.grad

    one, other = gradient(kvplug.PagedCache(model, 16)), gradient(kvplug.DenseCache(model))
    assert (one - other).norm() / other.norm() < 1e-4


def test_a_pool_does_not_keep_its_model(model):
    own = models.tiny_llama()
    pool = kvplug.PagePool(own, PAGE)
    assert pool.config is own
    assert len(pickle.dumps(kvplug.PagedCache(own, pool=pool))) < 100_000
    seen = weakref.ref(own)
    del own
    gc.collect()
    assert seen() is None


def test_a_saved_cache_comes_back_with_its_sharing_into_a_pool(model, tmp_path):
    ids = models.tokens(1, 30)
    cache = kvplug.prefill(model, ids, kvplug.PagedCache(model, PAGE), rows=3)
    cache.save(tmp_path / "x")
    pool = kvplug.PagePool(model, PAGE)
    back = kvplug.load(tmp_path / "x", model, pool=pool)
    assert type(back) is kvplug.PagedCache
    assert back.pool is pool
    assert pool.pages_held == cache.pool.pages_held == 8
    pool.keep(back, ids.expand(3, -1))
    options = dict(num_beams=3, max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(ids))
    assert model.generate(ids, past_key_values=back, **options).equal(
        model.generate(ids, past_key_values=cache, **options)
    )
    pool.check()
    with pytest.raises(ValueError, match="page_size=4"):
        kvplug.load(tmp_path / "x", model, pool=kvplug.PagePool(model, 8))
    kvplug.DenseCache(model).save(tmp_path / "dense")
    with pytest.raises(ValueError, match=r"^pool=.* is for a cache that was saved in pages"):
        kvplug.load(tmp_path / "dense", model, pool=pool)
    small = kvplug.PagePool(model, PAGE, max_bytes=3 * PAGE * TOKEN)
    with pytest.raises(kvplug.OutOfPages):
        kvplug.load(tmp_path / "x", model, pool=small)
    assert small.pages_held == 0
