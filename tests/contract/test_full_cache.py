"""A cache that drops nothing and encodes nothing is DynamicCache, token for token and logit for logit, whatever
`generate` does; so is an evicting one whose budget is never reached, whatever the mask, the padding and the feeding.
"""

import pytest
import torch
from transformers import DynamicCache

import kvplug
from tests import models
from tests.caches import ROOMY, named
from tests.oracles import NAME, SAME_KERNEL, feed

MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8},
    "beams": {"num_beams": 4},
    "several_sequences": {"do_sample": True, "num_return_sequences": 3},
    "chunked_prefill": {"prefill_chunk_size": 5},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}
PROMPTS = {"alone": [12], "batch": [12, 12, 12], "padded": [5, 14, 9, 1]}
# transformers: "assisted generate is only supported for batch_size = 1"; and it refuses caches that may drop tokens.
RUNS = [
    pytest.param(kind, mode, prompt, id=f"{kind}-{mode}-{prompt}")
    for kind in ROOMY
    for mode in MODES
    for prompt in PROMPTS
    if mode != "prompt_lookup" or (prompt == "alone" and not kind.name.startswith("roomy"))
]


def generate(model, cache, ids, mask, **options):
    torch.manual_seed(7)
    options = {"do_sample": False, "max_new_tokens": 20, **options}
    return model.generate(
        ids, attention_mask=mask, past_key_values=cache, return_dict_in_generate=True, output_logits=True, **options
    )


@pytest.mark.parametrize(("kind", "mode", "prompt"), RUNS)
def test_generate_gives_the_tokens_and_logits_of_the_default_cache(kind, mode, prompt):
    _, ids, mask = models.left_padded(PROMPTS[prompt])
    expected = generate(models.tiny_llama(), DynamicCache(), ids, mask, **MODES[mode])
    model = models.tiny_llama()
    result = generate(model, kind.make(model), ids, mask, **MODES[mode])
    assert result.sequences.equal(expected.sequences)
    assert len(result.logits) == len(expected.logits)
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        assert torch.allclose(ours, theirs, atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", **named(ROOMY))
def test_both_attention_implementations_are_routed(kind, attention):
    ids, chunks = models.tokens(2, 24), [9, 1, 1, 5, 8]
    expected = feed(models.tiny_llama(attention=attention), DynamicCache(), ids, chunks)
    model = models.tiny_llama(attention=attention)
    result = feed(model, kind.make(model), ids, chunks)
    assert torch.allclose(result, expected, atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("steps_have_a_mask", [True, False], ids=["mask", "no_mask"])
@pytest.mark.parametrize("kind", **named(ROOMY))
def test_padding_between_a_prefix_and_its_continuation(kind, steps_have_a_mask):
    """Rows of one prefix go on with suffixes of different lengths, padded on their left: pads lie in the middle, and
    rows hold different numbers of tokens. Each row then takes two steps; a step that comes without a mask must not read
    what is padding or empty, where the cache knows about it (under a policy)."""
    if not steps_have_a_mask and not kind.name.startswith("roomy"):
        return  # a cache that drops nothing has no reason to look at masks; neither does transformers' own
    prefix, (suffixes, tail, tail_mask) = models.tokens(3, 7, seed=9), models.left_padded([2, 6, 4])
    steps = models.tokens(3, 2, seed=11)
    ids = torch.cat([prefix, tail, steps], dim=1)
    mask = torch.cat([torch.ones_like(prefix), tail_mask, torch.ones_like(steps)], dim=1)
    model = models.tiny_llama()
    cache = kind.make(model)
    logits = feed(model, cache, ids[:, :13], [7, 6], mask)[:, -1:]
    if steps_have_a_mask:
        logits = torch.cat([logits, feed(model, cache, steps, [1, 1], mask)], dim=1)
    else:
        for step in range(2):
            positions = mask.sum(-1, keepdim=True) - 2 + step
            with torch.no_grad():
                made = model(steps[:, step : step + 1], position_ids=positions, **{NAME: cache}).logits
            logits = torch.cat([logits, made], dim=1)
    for row, suffix in enumerate(suffixes):
        alone = torch.cat([prefix[row : row + 1], suffix, steps[row : row + 1]], dim=1)
        with torch.no_grad():
            expected = models.tiny_llama()(alone, use_cache=False).logits[0, -3:]
        assert torch.allclose(logits[row], expected, atol=SAME_KERNEL, rtol=0)


@pytest.mark.parametrize("kind", **named(ROOMY))
def test_a_custom_four_dimensional_mask(kind):
    """The second forward gives its own 4D mask, which hides every third token of the past."""
    ids = models.tokens(1, 16)
    mask = torch.zeros(1, 1, 4, 16)
    mask[..., 12:] = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    mask[..., 1:12:3] = torch.finfo(torch.float32).min
    results = []
    for make in (lambda m: DynamicCache(), kind.make):
        model = models.tiny_llama()
        cache = make(model)
        feed(model, cache, ids[:, :12], [12])
        with torch.no_grad():
            results.append(model(ids[:, 12:], attention_mask=mask, **{NAME: cache}).logits)
    assert torch.allclose(results[1], results[0], atol=SAME_KERNEL, rtol=0)


def test_half_precision(model):
    """bfloat16 end to end: the same kernel on the same values gives the same tokens."""
    ids = models.tokens(2, 12)
    expected = generate(models.tiny_llama().bfloat16(), DynamicCache(), ids, torch.ones_like(ids))
    model = model.bfloat16()
    result = generate(model, kvplug.DenseCache(model), ids, torch.ones_like(ids))
    assert result.sequences.equal(expected.sequences)
