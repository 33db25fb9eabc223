"""Train a model whose layers share K and V, and see what sharing costs: `python examples/train_cla.py`.

A small Llama that reads bytes is trained on the embedded text three times, with the same seed and the same batches:
each layer with K and V of its own; with those of the layer before for every second layer (CLA2,
https://arxiv.org/abs/2405.12981); and with those of one layer for the whole upper half (YOCO,
https://arxiv.org/abs/2405.05254). The cache that shares is the same in training and in generation. The last two rows
impose sharing on the model that was trained without it: sharing that is learned costs little, sharing that is imposed
costs much.

A layer that borrows K and V never uses its own k_proj and v_proj. They get no gradient and stay as they were drawn, so
a model that shares has fewer trained parameters; the table counts those that are trained.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

from collections.abc import Iterator
from typing import Annotated

import torch
import typer
from torch.nn.functional import cross_entropy
from transformers import Cache, LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import kvplug
from evals import console, report, texts

CONTEXT = 256
BATCH = 8
# Rows of the text kept for validation that are read, and the bytes of each that are read at once as a prompt.
ROWS, PROMPT = 32, 64
RATE, WEIGHT_DECAY, CLIP = 2e-3, 0.1, 1.0
SHARING = {"CLA2": "cla2", "YOCO": "yoco"}
HEADS = ["model", "trained parameters", "training evaluation", "through the cache", "bytes per token"]


def main(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Batches that each model is trained on.")] = 300,
    layers: Annotated[int, typer.Option("--layers", min=2)] = 8,
    hidden: Annotated[int, typer.Option("--hidden", help="Width of the model, a multiple of 16.")] = 192,
    seed: console.SeedOption = 0,
    save: Annotated[Path | None, typer.Option("--save", help="Folder for the trained models.")] = None,
) -> None:
    """Trains with and without shared K and V, then compares perplexity per byte and the memory of the cache."""
    training, validation = split(texts.read().content)
    cells, models = [], {}
    for name in ("own", *SHARING):
        models[name] = build(layers, hidden, seed)
        parameters = train(models[name], cache_of(models[name], name), batches(training, steps, seed), steps, name)
        cells.append([name, f"{parameters:,}", *measure(models[name], name, validation)])
        if save:
            models[name].save_pretrained(save / name.lower())
    for name in SHARING:
        cells.append([f"own, {name} imposed", cells[0][1], *measure(models["own"], name, validation)])
    console.show(report.rich_table(report.Table(f"Perplexity per byte after {steps} steps", HEADS, cells)))


def split(content: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on, `[bytes]`, and the windows to validate with, `[rows, CONTEXT]`, from the last tenth.

    The language reference says some things twice; here each paragraph stays once, so that nothing that is validated
    was trained on.
    """
    paragraphs: dict[str, str] = {}
    for paragraph in content.split("\n\n"):
        paragraphs.setdefault(" ".join(paragraph.split()), paragraph)
    data = torch.tensor(list("\n\n".join(paragraphs.values()).encode()))
    end = 9 * len(data) // 10
    return data[:end], data[end:].unfold(0, CONTEXT, (len(data) - end - CONTEXT) // (ROWS - 1))[:ROWS]


def batches(data: torch.Tensor, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Windows of `data` at random, `[BATCH, CONTEXT]`; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    windows = data.unfold(0, CONTEXT, 1)
    for _ in range(steps):
        yield windows[torch.randint(len(windows), (BATCH,), generator=generator)]


def build(layers: int, hidden: int, seed: int) -> LlamaForCausalLM:
    """A Llama that reads bytes, with four query heads and two of K and V; the same weights for the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def cache_of(model: LlamaForCausalLM, name: str) -> Cache:
    """The cache that the model `name` is trained with, evaluated with, and generates with."""
    return kvplug.SharedCache(model, groups=SHARING[name]) if name in SHARING else kvplug.DenseCache(model)


def train(model: LlamaForCausalLM, cache: Cache, batches: Iterator[torch.Tensor], steps: int, name: str) -> int:
    """Trains `model` through `cache`, emptied before each batch.

    Returns:
        How many parameters were trained: all that the last batch had a gradient for.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    with console.progress(steps, name, "step") as bar:
        for ids in batches:
            cache.reset()
            loss = model(ids, labels=ids, past_key_values=cache).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            bar.set_postfix(perplexity=f"{loss.exp().item():.2f}", refresh=False)
            bar.update()
    model.eval()
    return sum(parameter.numel() for parameter in model.parameters() if parameter.grad is not None)


def measure(model: LlamaForCausalLM, name: str, rows: torch.Tensor) -> list[str]:
    """The cells of a table: perplexity in one forward and through the cache, and the bytes that a token takes there."""
    cache = cache_of(model, name)
    whole = perplexity(model, cache, rows, [CONTEXT])
    decoded = perplexity(model, cache, rows, [PROMPT] + [1] * (CONTEXT - PROMPT))
    return [f"{whole:.4f}", f"{decoded:.4f}", f"{cache.memory().bytes_per_token:,.0f}"]


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, cache: Cache, rows: torch.Tensor, pieces: list[int]) -> float:
    """Perplexity per byte of `rows`, read in forwards of so many bytes each, with the cache kept from one to the next.

    One piece is how a model is evaluated in training; a prompt and then single bytes are how it generates.
    """
    cache.reset()
    logits = [model(piece, past_key_values=cache).logits for piece in rows.split(pieces, dim=1)]
    predicted = torch.cat(logits, dim=1)[:, :-1]
    return cross_entropy(predicted.flatten(0, 1), rows[:, 1:].flatten()).exp().item()


if __name__ == "__main__":
    console.run(main)
