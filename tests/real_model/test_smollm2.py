"""A trained model: the exact cache gives the default one's tokens, quantised ones hold what they claim, and sinks are
what keeps a window alive. Random weights can't show the last two.
"""

import pydoc_data.topics
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvplug
from tests.oracles import NAME
from tests.walker import bytes_held, tensors

PROMPTS = [
    "The capital of France is",
    "Write a short poem about the sea and the people who live beside it.",
    "def fibonacci(n):\n    ",
    "List three things to check before a long drive, and say why each of them matters.",
    "Once upon a time, in a village between two rivers, there lived a clockmaker who",
    "Q: What is 17 + 25?\nA:",
    "Explain to a child why the sky is blue.",
    "The following is a list of animals: cat, dog, horse, cow, sheep, goat, duck, hen, pig,",
]
NEW = 64


@pytest.fixture(scope="module")
def prompts(smollm2):
    tokenizer = smollm2.tokenizer
    tokenizer.padding_side = "left"
    return tokenizer(PROMPTS, return_tensors="pt", padding=True)


def run(model, cache, ids, mask):
    """Greedy tokens `[rows, 64]` and their logits `[rows, 64, vocab]`; an end of text does not stop a row."""
    made = model.generate(
        ids, attention_mask=mask, past_key_values=cache, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    return made.sequences[:, ids.shape[1] :], torch.stack(made.logits, dim=1)


def alone(prompts, row):
    real = prompts.attention_mask[row].bool()
    return prompts.input_ids[row : row + 1, real], torch.ones(1, int(real.sum()), dtype=torch.long)


# Logits are of size 30, of which one rounding in fp32 is 2e-6; thirty layers add up a few dozen of them.
LOGITS = 1e-4


def assert_same(model, ids, mask):
    """Two runs of `generate` that differ in the cache alone."""
    kvplug.detach(model)
    expected, expected_logits = run(model, DynamicCache(), ids, mask)
    made, logits = run(model, kvplug.DenseCache(model), ids, mask)
    kvplug.detach(model)
    assert made.equal(expected)
    assert torch.allclose(logits, expected_logits, atol=LOGITS, rtol=0)


@pytest.mark.parametrize("row", [0, 1])
def test_dense_gives_the_default_cache_s_tokens_alone(smollm2, prompts, row):
    assert_same(smollm2.model, *alone(prompts, row))


def test_dense_gives_the_default_cache_s_tokens_in_a_left_padded_batch(smollm2, prompts):
    assert prompts.attention_mask.sum(1).unique().numel() > 4, "rows of different lengths"
    assert_same(smollm2.model, prompts.input_ids, prompts.attention_mask)


@pytest.mark.parametrize("row", range(2, len(PROMPTS)))
def test_dense_tokens_are_the_default_cache_s_choice_at_every_step(smollm2, prompts, row):
    """In a third of the time: the default cache reads the prompt and what DenseCache made of it, and would have chosen
    the same token after each of them."""
    model, (ids, mask) = smollm2.model, alone(prompts, row)
    made, logits = run(model, kvplug.DenseCache(model), ids, mask)
    kvplug.detach(model)
    with torch.no_grad():
        read = model(torch.cat([ids, made[:, :-1]], 1), **{NAME: DynamicCache()}).logits[:, ids.shape[1] - 1 :]
    assert torch.allclose(logits, read, atol=LOGITS, rtol=0)
    read[..., model.generation_config.eos_token_id] = -torch.inf  # as `min_new_tokens` does
    assert made.equal(read.argmax(-1))


@pytest.fixture(scope="module")
def text(smollm2):
    """Tokens `[1, 420]` of the Python language reference, which every CPython carries."""
    return smollm2.tokenizer(pydoc_data.topics.topics["assignment"], return_tensors="pt").input_ids[:, :420]


@pytest.mark.parametrize(("dtype", "limit"), [("int8", 8.6), ("fp8", 8.3), ("int4:residual=0,sinks=0", 8.8)])
def test_generate_itself_compresses(smollm2, text, dtype, limit):
    """Bits of an element as held, all but spare capacity: counted from the storages and from the model's shape. int4
    has 4.5, and 47 of the 303 tokens wait for their group in fp32: 0.155 × 32 + 0.845 × 4.5 = 8.77."""
    model, config = smollm2.model, smollm2.model.config
    cache = kvplug.from_spec(dtype, model)
    made = model.generate(text[:, :300], past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    kvplug.detach(model)
    seen = made.shape[1] - 1
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * seen
    plain = sum(t.numel() for t in tensors(cache) if t.dtype not in (torch.uint8, torch.bfloat16))
    assert plain == 0 or "int4" in dtype
    report = cache.memory()
    assert report.total == bytes_held(cache)
    assert report.elements == elements
    bits = 8 * (bytes_held(cache) - report.spare) / elements
    assert bits <= limit
    assert report.bits_per_element == pytest.approx(bits)
    assert report == kvplug.plan(config, dtype, seen, dtype=torch.float32)


def nll(model, cache, ids, chunk=30):
    """Nats a token over the second half of `ids`, read through the cache in small chunks."""
    losses = []
    with torch.no_grad():
        for start in range(0, ids.shape[1] - 1, chunk):
            inputs = ids[:, start : start + chunk]
            targets = ids[0, start + 1 : start + 1 + inputs.shape[1]]
            logits = model(inputs[:, : len(targets)], **{NAME: cache}).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
    return torch.cat(losses)[ids.shape[1] // 2 :].mean()


SINKS, NO_SINKS = "streaming:sinks=4,window=92", "window:window=96"
PLAN = f"shared:plan={Path(__file__).parents[2] / 'docs' / 'sharing' / 'plan.json'}"
NEIGHBOURS, MERGED = "shared:groups=14-15/16-17/18-19/20-21/22-23/24-25/26-27/28-29", "minicache:start=8"


@pytest.fixture(scope="module")
def losses(smollm2, text):
    model = smollm2.model
    full = nll(model, DynamicCache(), text)
    specs = ["dense", "int8", "fp8", "int4", SINKS, NO_SINKS, PLAN, NEIGHBOURS, MERGED]
    made = {spec: float(nll(model, kvplug.from_spec(spec, model), text) - full) for spec in specs}
    kvplug.detach(model)
    return made


@pytest.mark.parametrize(("spec", "limit"), [("dense", 1e-5), ("int8", 0.01), ("fp8", 0.03), ("int4", 0.12)])
def test_a_trained_model_survives_its_codes(losses, spec, limit):
    """Loss above the full cache's, read through the cache. A code read wrongly costs whole nats; the limits are a few
    times what these formats cost on text, as only 210 tokens are predicted."""
    assert abs(losses[spec]) <= limit


def test_a_window_needs_its_sinks(losses):
    """The same budget with four sinks and without: at least 1.5 times the perplexity without."""
    ratio = torch.tensor(losses[NO_SINKS] - losses[SINKS]).exp()
    assert ratio >= 1.5


@pytest.mark.parametrize(("spec", "limit"), [(PLAN, 0.6), (MERGED, 0.15)], ids=["plan", "merged"])
def test_layers_share_better_than_naive_neighbours(smollm2, losses, spec, limit):
    """At no more than 3/4 of the bytes of long prompts: within some tenths of a nat, where as many neighbours that
    share unasked cost more than a nat."""
    assert losses[spec] <= limit
    assert losses[NEIGHBOURS] >= max(1.0, 3 * losses[spec])
    planned = kvplug.plan(smollm2.model.config, spec, 4096, dtype=torch.float32)
    assert planned.total <= 0.75 * planned.dense_total
