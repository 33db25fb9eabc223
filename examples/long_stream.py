"""Generate without end in constant memory: StreamingLLM keeps the first tokens and a recent window.

A full cache would grow with every token, and stop making sense past the positions that the model was trained on; a
window without the first tokens would fall apart at once. Runs offline, as `python examples/long_stream.py`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

from typing import Annotated

import torch
import typer
from transformers import TextStreamer

import kvplug
from evals import console, models

PROMPT = "The following is a long and eventful story about a lighthouse keeper.\n\nChapter 1\n\n"


def main(
    model: console.ModelOption = models.EMBEDDED,
    sinks: Annotated[int, typer.Option("--sinks", help="First tokens that are kept.")] = 4,
    window: Annotated[int, typer.Option("--window", help="Recent tokens that are kept.")] = 252,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate.")] = 1000,
    prompt: Annotated[str, typer.Option("--prompt")] = PROMPT,
    seed: console.SeedOption = 0,
) -> None:
    """Streams text that is longer than the cache, and tells what the cache held in the end."""
    torch.manual_seed(seed)
    loaded = models.load(model)
    inputs = loaded.tokenizer(prompt, return_tensors="pt")
    cache = kvplug.StreamingLLMCache(loaded.model, sinks=sinks, window=window)
    loaded.model.generate(
        **inputs,
        past_key_values=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=True,
        temperature=0.8,
        top_p=0.95,
        repetition_penalty=1.1,
        streamer=TextStreamer(loaded.tokenizer, skip_special_tokens=True),
    )
    print(f"\n[{cache.memory()}]")


if __name__ == "__main__":
    console.run(main)
