"""What a cache still finds: `python -m evals.retrieval`, passkeys and several needles at stated depths and lengths.

The context goes through the cache before the question is known, so that a cache that drops tokens has to guess. Must
never let the figure for a question that was seen first stand for that one: it is told apart everywhere.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from evals import console, figure, held, metrics, models, report, runner, specs, texts
from evals.errors import InputError
from evals.runner import Eval, Piece

DEFAULT_CACHES = ["int8", "int4", "int3", "window:window=240", "streaming:sinks=4,window=236"]
LENGTHS = [900]
DEPTHS = [0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 0.95]
NEEDLES = [1]
SAMPLES = 2

# `{of}` is empty for a single needle, " for NAME" where there are several.
NEEDLE = "\n\nThe pass key{of} is {key}. Remember it. {key} is the pass key{of}.\n\n"
QUESTION = "\n\nWhat is the pass key{of}? The pass key{of} is"
NAMES = ["Berlin", "Cairo", "Delhi", "Geneva", "Havana", "Lima", "London", "Madrid", "Moscow", "Oslo", "Paris", "Rome"]
NAMES += ["Sydney", "Tokyo", "Toronto", "Vienna"]
# Tokens after those of a right answer: a longer number that only begins with the key must be seen to go on.
SLACK = 3
ORDERS = ("after", "before")

NOTES = [
    "**question after** is the figure that counts: the context goes through the cache in one forward, so that the "
    "cache drops or compresses tokens without knowing what will be asked; then the question is fed, then the answer "
    "is decoded greedily.",
    "**question before** measures far less: context and question go in as one prompt, whose own attention is exact, "
    "and a cache that chooses by attention has seen what it will be asked before it drops anything. The first token "
    "of the answer then comes from the prompt's exact attention, whatever the cache keeps.",
    "An answer counts where the five digits of the very needle that was asked for stand in it as a number of their "
    "own. The brackets are 95% Wilson intervals over the n questions; the needles of one context are counted as if "
    "they were independent.",
    f"A needle reads `{NEEDLE.strip()}`, the question `{QUESTION.strip()}` as a plain continuation, without a chat "
    "template; `{of}` is empty for one needle and names it where there are several.",
    "**depth** is where the needle's middle lies, as a share of the context. One needle is put at each of the depths "
    "in turn, several needles share a context and lie evenly spread. A needle that would stick out of the context is "
    "moved inside; report.json tells where each one lay, what was answered and what was wanted.",
    "**bytes held** are all bytes that the cache object holds after context and question (unique tensor storages "
    "reachable from it, spare capacity included); **of full** is their share of what the full cache holds there.",
]


@dataclass(frozen=True)
class Fact:
    """One needle: its name (empty where it is the only one), its key, the depth asked for, its tokens' place."""

    name: str
    key: str
    depth: float
    start: int
    stop: int

    @property
    def question(self) -> str:
        """What is asked to get the key."""
        return QUESTION.format(of=of(self.name))


@dataclass(frozen=True)
class Case:
    """A context of token ids with its needles; `start` is where its text begins in the data set, in tokens."""

    ids: list[int]
    facts: list[Fact]
    start: int


def of(name: str) -> str:
    """How a needle's name is told in a sentence."""
    return f" for {name}" if name else ""


@dataclass
class Retrieval(Eval):
    """Hides needles in `tokens`, the text's token ids; a piece is one context through one cache, all its questions.

    Attributes:
        opening: what each context begins with: the token by which the model's tokenizer opens a text, or nothing.
        lengths: tokens in a context, needles included, the question left out.
        depths: where a single needle lies; several needles are spread evenly.
        needles: how many there are in a context.
        samples: contexts for each length and depth.
    """

    tokens: list[int] = field(default_factory=list, repr=False)
    opening: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=lambda: list(LENGTHS))
    depths: list[float] = field(default_factory=lambda: list(DEPTHS))
    needles: list[int] = field(default_factory=lambda: list(NEEDLES))
    samples: int = SAMPLES

    name: ClassVar[str] = "retrieval"
    title: ClassVar[str] = "Needles found"

    def __post_init__(self) -> None:
        self.lengths, self.depths, self.needles = (sorted(set(x)) for x in (self.lengths, self.depths, self.needles))

    def protocol(self) -> dict:
        return {"lengths": self.lengths, "depths": self.depths, "needles": self.needles, "samples": self.samples}

    def cells(self, needles: int) -> list[float | None]:
        """The depths that get contexts of their own: None where the needles of one context have all depths."""
        return list(self.depths) if needles == 1 else [None]

    def pieces(self) -> list[Piece]:
        found = []
        for needles in self.needles:
            for length in self.lengths:
                for depth in self.cells(needles):
                    for sample in range(self.samples):
                        where = f"needles {needles}, length {length}, depth {depth}, sample {sample}"
                        case = (needles, length, depth, sample)
                        size = len(ORDERS) * needles * length
                        found += [Piece(f"{where}, {spec}", size, (spec, *case)) for spec in self.order]
        return found

    def check(self) -> None:
        """Raises an `InputError` that names the option where what was asked for can't be done, before a run starts."""
        if self.samples < 1:
            raise InputError(f"--samples: got {self.samples}, accepted is 1 or more")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise InputError(f"--depth: got {depth}, accepted is 0 (the context's start) to 1 (its end)")
        for needles in self.needles:
            if not 1 <= needles <= len(NAMES):
                raise InputError(f"--needles: got {needles}, accepted is 1 to {len(NAMES)}")
        positions = self.loaded.max_positions
        for length in self.lengths:
            if len(self.tokens) < length:
                raise InputError(
                    f"--length: got {length:,}, accepted is up to the {len(self.tokens):,} tokens of the text; "
                    "give a longer one with --dataset"
                )
        for piece in (piece for piece in self.pieces() if piece.of[0] == specs.REFERENCE):
            length, case = piece.of[2], self.case(*piece.of[1:])
            extra = self.capacity(case) - length
            if positions is not None and length + extra > positions:
                raise InputError(
                    f"--length: got {length:,}, accepted is up to {positions - extra:,}: the model has {positions:,} "
                    f"positions, question and answer need {extra}"
                )

    def encode(self, text: str) -> list[int]:
        """The tokens of a piece of text that others stand before."""
        return self.loaded.tokenizer(text, add_special_tokens=False).input_ids

    def limit(self, fact: Fact) -> int:
        """Tokens that an answer may have."""
        return len(self.encode(f" {fact.key}")) + SLACK

    def capacity(self, case: Case) -> int:
        """Tokens of the context, the longest question and the longest answer."""
        return len(case.ids) + max(len(self.encode(fact.question)) + self.limit(fact) for fact in case.facts)

    def case(self, needles: int, length: int, depth: float | None, sample: int) -> Case:
        """One context; it depends on the seed and on these numbers alone, so that all caches see the same.

        Raises:
            InputError: the needles don't fit.
        """
        draw = random.Random(f"{self.seed} {needles} {length} {depth} {sample}")
        start = draw.randrange(len(self.tokens) - length + 1)
        text = self.tokens[start : start + length]
        written = self.loaded.tokenizer.decode(text)
        # A key that the text holds anyway could be found without its needle, and two needles must not share one.
        keys: list[str] = []
        while len(keys) < needles:
            key = str(draw.randrange(10_000, 100_000))
            if key not in written and key not in keys:
                keys.append(key)
        names = draw.sample(NAMES, needles) if needles > 1 else [""]
        depths = [depth] if needles == 1 else [(i + 0.5) / needles for i in range(needles)]
        hidden = [self.encode(NEEDLE.format(of=of(n), key=key)) for n, key in zip(names, keys, strict=True)]
        least = len(self.opening) + needles * (max(map(len, hidden)) + 2)
        if length < least:
            raise InputError(f"--length: got {length}, accepted is {least} or more for {told(needles)}")
        ids, facts, text = list(self.opening), [], iter(text)
        for i, needle in enumerate(hidden):
            last = length - sum(map(len, hidden[i:]))
            begin = min(max(round(depths[i] * length - len(needle) / 2), len(ids)), last)
            ids += [next(text) for _ in range(begin - len(ids))] + needle
            facts.append(Fact(names[i], keys[i], depths[i], begin, len(ids)))
        ids += [next(text) for _ in range(length - len(ids))]
        return Case(ids, facts, start)

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """What was answered to each question of one context, and what the cache held when the answer began."""
        spec, case = piece.of[0], self.case(*piece.of[1:])
        room, asked, memory = self.capacity(case), [], None
        for fact in case.facts:
            question = self.encode(fact.question)
            parts = {"after": [case.ids, question], "before": [case.ids + question]}
            # A cache is filled afresh for each question: the answer to one must not be in the way of the next.
            answers = {}
            for order in ORDERS:
                answers[order], counted = self.answer(spec, parts[order], self.limit(fact), room)
                memory = memory or counted
                tick(len(case.ids))
            place = (fact.start + fact.stop) / 2 / len(case.ids)
            asked.append({"name": fact.name, "depth": fact.depth, "middle": place, "wanted": fact.key, **answers})
        return {"start": case.start, "asked": asked, "memory": memory}

    @torch.no_grad()
    def answer(self, spec: str, parts: list[list[int]], limit: int, room: int) -> tuple[str, dict]:
        """Feeds each of `parts` with one forward through a fresh cache, then decodes greedily.

        Returns:
            The text of up to `limit` tokens, and the cache's memory before the first of them was fed.
        """
        model = self.loaded.model
        ends = model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        with specs.routed(spec, model):
            before = held.start_peak(model.device)
            # The last token is always fed by itself, so that there is a prediction to go on from.
            context = torch.tensor([parts[0][:-1]], device=model.device)
            cache = specs.build(spec, model, capacity=room, context=context)
            parts = [parts[0][cache.get_seq_length() :], *parts[1:]]
            for part in parts:
                token = self.next_token(part, cache)
            memory = held.counted(cache, model, cache.get_seq_length())
            found: list[int] = []
            while token not in ends:
                found.append(token)
                if len(found) == limit:
                    break
                token = self.next_token([token], cache)
            memory["peak_device_bytes"] = held.peak_since(model.device, before)
        return self.loaded.tokenizer.decode(found), memory

    def next_token(self, ids: list[int], cache) -> int:
        """The likeliest token after `ids`, which are fed with one forward."""
        fed = torch.tensor([ids], device=self.loaded.model.device)
        return models.forward(self.loaded.model, fed, cache, logits_to_keep=1).logits[0, -1].argmax().item()

    def results(self, records: dict[str, dict]) -> list[dict]:
        found = runner.by_spec(self, records, self.pieces())
        cases = [piece.of[1:] for piece in self.pieces() if piece.of[0] == specs.REFERENCE]
        return [self.entry(spec, found[spec], found[specs.REFERENCE], cases) for spec in self.order]

    def entry(self, spec: str, records: list[dict], full: list[dict], cases: list[tuple]) -> dict:
        """One cache: over all questions, over those of each number of needles and length, and of each depth."""
        asked, sizes = [], {}
        for (needles, length, _, sample), record, reference in zip(cases, records, full, strict=True):
            told_of = {"needles": needles, "length": length, "sample": sample, "start": record["start"]}
            asked += [{**told_of, **one} for one in record["asked"]]
            sizes.setdefault((needles, length), held.beside(record["memory"], reference["memory"]))
        by_length = [
            {**dict(zip(("needles", "length"), key, strict=True)), **recall(own), "memory": sizes[key]}
            for key, own in grouped(asked, "needles", "length").items()
        ]
        cells = [
            {**dict(zip(("needles", "length", "depth"), key, strict=True)), **recall(own)}
            for key, own in grouped(asked, "needles", "length", "depth").items()
        ]
        longest = max(by_length, key=lambda part: part["length"])
        return {
            "spec": spec,
            "recall": recall(asked),
            "by_length": by_length,
            "cells": cells,
            "asked": asked,
            "memory": longest["memory"],
        }

    def tables(self, result: dict) -> list[report.Table]:
        return [recall_table(result), *depth_tables(result)]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def grouped(asked: list[dict], *names: str) -> dict[tuple, list[dict]]:
    """Questions that agree in all of `names`, in the order of their first."""
    found: dict[tuple, list[dict]] = {}
    for one in asked:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    return found


def recall(asked: list[dict]) -> dict[str, dict]:
    """The metric over these questions, for both orders of context and question."""
    wanted = [one["wanted"] for one in asked]
    compute = metrics.load("recall").compute
    return {order: compute(predictions=[one[order] for one in asked], references=wanted) for order in ORDERS}


def told(needles: int) -> str:
    """A number of needles, in words."""
    return "1 needle" if needles == 1 else f"{needles} needles"


def recall_table(result: dict) -> report.Table:
    """Recall and memory of each cache for each number of needles and length."""
    heads = ["cache", "needles", "length", "recall, question after", "question before", "n", "bytes held", "of full"]
    cells = []
    for entry in result["results"]:
        for part in entry["by_length"]:
            cells.append(
                [
                    entry["spec"],
                    f"{part['needles']}",
                    f"{part['length']:,}",
                    *(f"{x['recall']:.2f} [{x['low']:.2f}–{x['high']:.2f}]" for x in (part[o] for o in ORDERS)),
                    f"{part['after']['n']}",
                    f"{part['memory']['held_bytes']:,}",
                    f"{part['memory']['of_full']:.3f}",
                ]
            )
    return report.Table("Needles found", heads, cells)


def depth_tables(result: dict) -> list[report.Table]:
    """Recall of each cache at each depth with the question after, a table for each number of needles and length."""
    tables = []
    for needles, length in grouped(result["results"][0]["cells"], "needles", "length"):
        rows = [
            (entry["spec"], [c for c in entry["cells"] if (c["needles"], c["length"]) == (needles, length)])
            for entry in result["results"]
        ]
        heads = ["question after, at depth", *(f"{cell['depth']:.3g}" for cell in rows[0][1])]
        cells = [[spec, *(f"{cell['after']['recall']:.2f}" for cell in own)] for spec, own in rows]
        tables.append(report.Table(f"Recall by depth, {told(needles)} in {length:,} tokens", heads, cells))
    return tables


def draw(result: dict, path: Path) -> None:
    """Draws a heat map for each cache and number of needles, depth against length, question after, to a PNG file."""
    entries, lengths = result["results"], result["protocol"]["lengths"]
    groups = [
        (needles, [[cell for cell in entry["cells"] if cell["needles"] == needles] for entry in entries])
        for needles in result["protocol"]["needles"]
    ]
    # As many in a row as fit its width; each number of needles begins a row.
    wide = max(1.6, 0.5 + 0.62 * len(lengths))
    block = math.ceil(len(entries) / max(1, int(13 / wide)))
    columns = math.ceil(len(entries) / block)
    rows = block * len(groups)
    tall = max(1.6, 0.3 * max(len({cell["depth"] for cell in own[0]}) for _, own in groups)) + 0.7
    drawn, axes = figure.plt.subplots(
        rows,
        columns,
        figsize=(max(columns * wide + 1.4, 6.0), rows * tall + 0.7),
        dpi=160,
        layout="constrained",
        squeeze=False,
    )
    model = Path(result["model"]["name"]).name
    drawn.suptitle(f"{model}: share of needles found, question after the context", x=0.01, ha="left", fontsize=12)
    for first, (needles, panels) in enumerate(groups):
        places = axes[first * block : (first + 1) * block].flat
        for index, place in enumerate(places):
            if index >= len(entries):
                place.set_axis_off()
                continue
            title = figure.label_of(entries[index]["spec"]).replace(", ", ",\n")
            place.set_title(f"{title}\n{told(needles)}" if len(groups) > 1 else title, fontsize=10)
            depths = sorted({cell["depth"] for cell in panels[index]})
            found = {(cell["depth"], cell["length"]): cell["after"]["recall"] for cell in panels[index]}
            colored = figure.heat_map(
                place,
                [[found[depth, length] for length in lengths] for depth in depths],
                across=[f"{length:,}" for length in lengths],
                down=[f"{depth:.3g}" if index % columns == 0 else "" for depth in depths],
            )
    drawn.supxlabel("tokens of context", fontsize=11)
    drawn.supylabel("depth of the needle, share of the context", fontsize=11)
    bar = drawn.colorbar(colored, ax=axes, fraction=0.03, aspect=30, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
    bar.set_label("recall", fontsize=10)
    figure.save(drawn, path)


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    length: Annotated[
        list[int], typer.Option("--length", help="Tokens of context, the question on top; repeatable.")
    ] = LENGTHS,
    depth: Annotated[
        list[float],
        typer.Option("--depth", help="Where the middle of a single needle lies, 0 (start) to 1 (end); repeatable."),
    ] = DEPTHS,
    needles: Annotated[
        list[int],
        typer.Option("--needles", help="Needles in a context: 1 is a passkey, more lie evenly spread; repeatable."),
    ] = NEEDLES,
    samples: Annotated[int, typer.Option("--samples", help="Contexts for each length and depth.")] = SAMPLES,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Passkeys and several needles, asked for after the context went through the cache."""
    text = texts.read(dataset, column=column)
    loaded = models.load(model, device=device, dtype=dtype)
    cache = specs.check(cache, loaded.model, contexts=True)
    tokens = loaded.tokenizer(text.content, add_special_tokens=False, verbose=False).input_ids
    opening = loaded.tokenizer("a").input_ids[:1]
    work = Retrieval(
        loaded,
        cache,
        seed,
        {"source": text.source, "sha256": text.sha256, "tokens": len(tokens)},
        tokens=tokens,
        opening=opening if opening == [loaded.tokenizer.bos_token_id] else [],
        lengths=length,
        depths=depth,
        needles=needles,
        samples=samples,
    )
    work.check()
    runner.run(work, out)


if __name__ == "__main__":
    console.run(main)
