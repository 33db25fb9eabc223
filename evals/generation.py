"""Free writing: `python -m evals.generation`, what `generate` writes greedily with each cache against the full cache.

Must never be taken for a measure of how bad a text became: one flipped token makes another text for ever after. It
tells how soon a reader would see a difference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from evals import console, figure, held, metrics, models, report, runner, specs, texts
from evals.errors import InputError
from evals.runner import Eval, Piece

# `dense` is exact: where it leaves the full cache, rounding in another order of the same sums was enough.
DEFAULT_CACHES = ["dense", "int8", "int4", "window:window=240", "streaming:sinks=4,window=236"]
PROMPTS = 4
PROMPT_TOKENS = 512
NEW_TOKENS = 64

NOTES = [
    "Each cache and the full cache continue the same prompts with `model.generate`, greedily and always for all new "
    "tokens: an end-of-text token is ruled out, so that the lengths agree.",
    "**identical** is the share of continuations that are the full cache's, token for token; **first difference** the "
    "median number of tokens before they part (all of them where they never do); **edit distance** the mean number of "
    "insertions, deletions and substitutions between the two, as a share of their length.",
    "Greedy text never finds back after one flipped token, so an edit distance tells how soon a cache left the full "
    "cache's text, not how bad its own became: two equally good continuations can share nothing.",
    "A near tie between two tokens is decided by rounding. `dense` stores everything exactly and only sums in "
    "another order: what it loses here is the yardstick for what chance alone does.",
    "**bytes held** are all bytes that the cache object holds at the end (unique tensor storages reachable from it, "
    "spare capacity included). The token ids and the text of each continuation are in report.json.",
    "In the picture, lines of one height are drawn slightly apart.",
]


@dataclass
class Generation(Eval):
    """Continues `ids` `[prompts, prompt tokens]` with each cache; a piece is one prompt with one cache.

    Attributes:
        new_tokens: how many tokens are written after each prompt.
    """

    ids: torch.Tensor = None
    new_tokens: int = NEW_TOKENS

    name: ClassVar[str] = "generation"
    title: ClassVar[str] = "Greedy text against the full cache"

    def protocol(self) -> dict:
        prompts, tokens = self.ids.shape
        return {"prompts": prompts, "prompt_tokens": tokens, "new_tokens": self.new_tokens}

    def pieces(self) -> list[Piece]:
        prompts = range(len(self.ids))
        return [Piece(f"prompt {i}, {spec}", self.new_tokens, (spec, i)) for i in prompts for spec in self.order]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """The tokens that follow one prompt, their text, and what the cache holds at the end."""
        spec, index = piece.of
        model = self.loaded.model
        prompt = self.ids[index : index + 1].to(model.device)
        with specs.routed(spec, model):
            before = held.start_peak(model.device)
            # The last token that is written is never fed.
            fed = prompt.shape[1] + self.new_tokens - 1
            cache = specs.build(spec, model, capacity=fed)
            tokens = generate(model, prompt, cache, self.new_tokens)
            memory = held.counted(cache, model, fed)
            memory["peak_device_bytes"] = held.peak_since(model.device, before)
        tick(self.new_tokens)
        return {"tokens": tokens, "text": self.loaded.tokenizer.decode(tokens), "memory": memory}

    def results(self, records: dict[str, dict]) -> list[dict]:
        found = runner.by_spec(self, records, self.pieces())
        return [self.entry(spec, found[spec], found[specs.REFERENCE]) for spec in self.order]

    def entry(self, spec: str, records: list[dict], full: list[dict]) -> dict:
        """One cache beside the full one, over all prompts."""
        written = [record["tokens"] for record in records]
        wanted = [record["tokens"] for record in full]
        return {
            "spec": spec,
            "agreement": metrics.load("token_agreement").compute(predictions=written, references=wanted),
            "following": following(written, wanted),
            "texts": [
                {"prompt": i, "tokens": record["tokens"], "text": record["text"]} for i, record in enumerate(records)
            ],
            "memory": held.beside(records[-1]["memory"], full[-1]["memory"]),
        }

    def tables(self, result: dict) -> list[report.Table]:
        return [agreement_table(result)]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def generate(model, prompt: torch.Tensor, cache, count: int) -> list[int]:
    """The `count` tokens that `model.generate` writes greedily after `prompt` `[1, tokens]` through `cache`."""
    written = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        do_sample=False,
        # What a model brings for sampling has no say here, and would be warned about.
        temperature=None,
        top_p=None,
        top_k=None,
        repetition_penalty=1.0,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return written[0, prompt.shape[1] :].tolist()


def following(written: list[list[int]], wanted: list[list[int]]) -> list[float]:
    """The share of sequences that are still the wanted ones after 0, 1, … tokens."""
    pairs = list(zip(written, wanted, strict=True))
    count = len(wanted[0])
    return [sum(one[:n] == other[:n] for one, other in pairs) / len(pairs) for n in range(count + 1)]


def agreement_table(result: dict) -> report.Table:
    """Agreement with the full cache, and memory, of each cache."""
    heads = ["cache", "identical", "first difference", "edit distance", "prompts", "bytes held", "of full"]
    cells = []
    for entry in result["results"]:
        agreement, memory = entry["agreement"], entry["memory"]
        cells.append(
            [
                entry["spec"],
                f"{agreement['identical']:.2f}",
                f"{agreement['first_divergence']:g}",
                f"{agreement['edit_distance']:.3f}",
                f"{agreement['n']}",
                f"{memory['held_bytes']:,}",
                f"{memory['of_full']:.3f}",
            ]
        )
    return report.Table("Agreement with the full cache", heads, cells)


def draw(result: dict, path: Path) -> None:
    """Draws the share of prompts that still follow the full cache after each number of tokens, to a PNG file."""
    model = Path(result["model"]["name"]).name
    drawn, (axes,) = figure.canvas(f"{model}: how long greedy text stays the full cache's")
    entries = [entry for entry in result["results"] if entry["spec"] != specs.REFERENCE]
    for index, entry in enumerate(entries):
        shares = entry["following"]
        # Few prompts make few heights: lines that share one are drawn a little apart, markers at places of their own.
        nudge = (index - (len(entries) - 1) / 2) * 0.012
        every = max(len(shares) // 8, 1)
        axes.plot(
            range(len(shares)),
            [share - nudge for share in shares],
            drawstyle="steps-post",
            label=figure.label_of(entry["spec"]),
            markevery=(every * index // max(len(entries), 1), every),
            clip_on=False,
            **figure.line_style(index + 1),
        )
    axes.set_xlim(0, result["protocol"]["new_tokens"])
    axes.set_ylim(-0.05, 1.05)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_xlabel("tokens written", fontsize=11)
    axes.set_ylabel("share of prompts still as with the full cache (↑ better)", fontsize=11)
    if entries:
        axes.legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    prompts: Annotated[int, typer.Option("--prompts", help="Windows of text, spread over it.")] = PROMPTS,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", help="Tokens in a prompt.")] = PROMPT_TOKENS,
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens written after each.")] = NEW_TOKENS,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Greedy text with each cache against the full cache's: how soon, and how far, it parts."""
    for option, value in (("--prompts", prompts), ("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens)):
        if value < 1:
            raise InputError(f"{option}: got {value}, accepted is 1 or more")
    text = texts.read(dataset, column=column)
    loaded = models.load(model, device=device, dtype=dtype)
    positions = loaded.max_positions
    if positions is not None and new_tokens >= positions:
        raise InputError(
            f"--new-tokens: got {new_tokens:,}, accepted is up to {positions - 1:,}: the model has "
            f"{positions:,} positions"
        )
    if positions is not None and prompt_tokens + new_tokens > positions:
        raise InputError(
            f"--prompt-tokens: got {prompt_tokens:,}, accepted is up to {positions - new_tokens:,}: the model has "
            f"{positions:,} positions and --new-tokens takes {new_tokens:,}"
        )
    cache = specs.check(cache, loaded.model)
    cut = texts.windows(loaded.tokenizer, text, length=prompt_tokens, count=prompts)
    runner.run(Generation(loaded, cache, seed, texts.told(text, cut), ids=cut.ids, new_tokens=new_tokens), out)


if __name__ == "__main__":
    console.run(main)
