"""Whether a stream without end stays readable: `python -m evals.streaming`, one token at a time through a small cache.

The yardstick is the one of the StreamingLLM paper: recomputing the last tokens afresh for each prediction, far too slow
to serve. Must never compare losses at different positions.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from evals import console, figure, held, models, runner, specs, texts
from evals.errors import InputError
from evals.models import Loaded, forward
from evals.report import Table
from evals.runner import Eval, Piece

AFRESH = "recomputed afresh"
NOTES = [
    "**recomputed afresh** runs the last tokens through the model without a cache for each judged prediction: what a "
    "window of that length can know, at a cost that no one pays.",
    "All losses are taken at the same positions, those with at least two budgets of text behind them.",
]


@dataclass(frozen=True)
class Stream:
    """What is fed: `start` tokens in chunks, then `tokens` one by one; every `every`th prediction is judged."""

    start: int = 0
    tokens: int = 4096
    every: int = 32
    chunk: int = 256

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("tokens", 1), ("every", 1), ("chunk", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name}: got {getattr(self, name)}, accepted is {least} or more")

    @property
    def length(self) -> int:
        """Tokens of text that are needed, the last one as a target only."""
        return self.start + self.tokens + 1

    def judged(self, budget: int) -> list[int]:
        """Positions whose prediction is judged: those that have at least two budgets behind them."""
        first = max(self.start, 2 * budget)
        return list(range(first, self.start + self.tokens, self.every))


@torch.no_grad()
def streamed(loaded: Loaded, ids: torch.Tensor, cache, stream: Stream, judged: list[int], tick) -> torch.Tensor:
    """Negative log likelihood, in nats, of the token after each judged position, read through `cache`."""
    model, losses = loaded.model, []
    for first in range(0, stream.start, stream.chunk):
        block = ids[:, first : min(first + stream.chunk, stream.start)]
        forward(model, block, cache, logits_to_keep=1)
        tick(block.shape[1])
    wanted = set(judged)
    for position in range(stream.start, stream.start + stream.tokens):
        logits = forward(model, ids[:, position : position + 1], cache).logits[0, -1]
        if position in wanted:
            losses.append(-logits.float().log_softmax(-1)[ids[0, position + 1]])
        tick(1)
    return torch.stack(losses)


@torch.no_grad()
def recomputed(loaded: Loaded, ids: torch.Tensor, budget: int, judged: list[int], tick) -> torch.Tensor:
    """The same losses from one fresh forward over the last `budget` tokens for each judged position."""
    losses = []
    for position in judged:
        block = ids[:, position + 1 - budget : position + 1]
        logits = loaded.model(input_ids=block, use_cache=False, logits_to_keep=1).logits[0, -1]
        losses.append(-logits.float().log_softmax(-1)[ids[0, position + 1]])
        tick(1)
    return torch.stack(losses)


@dataclass
class Streaming(Eval):
    """Reads `ids` `[windows, length]` through each cache and afresh; a piece is one window in one of these ways."""

    ids: torch.Tensor = None
    stream: Stream = field(default_factory=Stream)
    budget: int = 256

    name: ClassVar[str] = "streaming"
    title: ClassVar[str] = "A stream through a small cache"

    def __post_init__(self) -> None:
        if not self.judged:
            limit = f"more than two budgets ({2 * self.budget})"
            raise InputError(f"--tokens: got {self.stream.tokens}, accepted is {limit}")

    @property
    def judged(self) -> list[int]:
        return self.stream.judged(self.budget)

    @property
    def order(self) -> list[str]:
        """Recomputing first: a full cache of a stream without end is what no one has."""
        return list(dict.fromkeys([AFRESH, *self.caches]))

    def protocol(self) -> dict:
        return {**asdict(self.stream), "budget": self.budget, "windows": len(self.ids)}

    def pieces(self) -> list[Piece]:
        sizes = {AFRESH: len(self.judged)}
        return [
            Piece(f"window {i}, {spec}", sizes.get(spec, self.stream.length - 1), (spec, i))
            for i in range(len(self.ids))
            for spec in self.order
        ]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """Losses at the judged positions of one window."""
        spec, index = piece.of
        window = self.ids[index : index + 1].to(self.loaded.model.device)
        if spec == AFRESH:
            return {"nll": recomputed(self.loaded, window, self.budget, self.judged, tick).tolist(), "memory": None}
        with specs.routed(spec, self.loaded.model):
            cache = specs.build(spec, self.loaded.model, capacity=self.stream.length)
            losses = streamed(self.loaded, window, cache, self.stream, self.judged, tick)
            memory = held.counted(cache, self.loaded.model, self.stream.length - 1)
        return {"nll": losses.tolist(), "memory": memory}

    def results(self, records: dict[str, dict]) -> list[dict]:
        found = runner.by_spec(self, records, self.pieces())
        entries = []
        for spec in self.order:
            by_window = [statistics.fmean(record["nll"]) for record in found[spec]]
            loss = statistics.fmean(by_window)
            entries.append(
                {
                    "spec": spec,
                    "loss": loss,
                    "loss_above_afresh": loss - entries[0]["loss"] if entries else 0.0,
                    "perplexity": math.exp(loss),
                    "perplexity_by_window": [math.exp(one) for one in by_window],
                    "predictions": len(self.judged) * len(by_window),
                    "positions": self.judged,
                    "nll": [record["nll"] for record in found[spec]],
                    "memory": found[spec][-1]["memory"],
                }
            )
        return entries

    def tables(self, result: dict) -> list[Table]:
        heads = ["cache", "perplexity", "by window", "nats above afresh", "predictions", "bytes held"]
        cells = [
            [
                entry["spec"],
                f"{entry['perplexity']:.2f}",
                ", ".join(f"{x:.2f}" for x in entry["perplexity_by_window"]),
                f"{entry['loss_above_afresh']:+.3f}",
                str(entry["predictions"]),
                f"{entry['memory']['held_bytes']:,}" if entry["memory"] else "",
            ]
            for entry in result["results"]
        ]
        return [Table(self.title, heads, cells)]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def draw(result: dict, path: Path) -> None:
    """Draws the running mean of the loss against the position, over all windows, to a PNG file at `path`."""
    model = Path(result["model"]["name"]).name
    drawn, (axes,) = figure.canvas(f"{model}: a stream read through a small cache")
    for index, entry in enumerate(result["results"]):
        losses = torch.tensor(entry["nll"], dtype=torch.double).mean(dim=0)
        running = losses.cumsum(0) / torch.arange(1, len(losses) + 1)
        label = entry["spec"] if entry["spec"] == AFRESH else figure.label_of(entry["spec"])
        axes.plot(entry["positions"], running, label=label, **{**figure.line_style(index), "markersize": 4})
    axes.set_xlabel("position in the stream, tokens", fontsize=11)
    axes.set_ylabel("mean loss so far, nats per token (↓ better)", fontsize=11)
    axes.legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)


def main(
    cache: console.CacheOption = ["streaming:sinks=4,window=252", "window:window=256"],  # noqa: B006
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Tokens recomputed afresh for each prediction.")] = 256,
    start: Annotated[int, typer.Option("--start", help="Tokens fed in chunks before the measurement.")] = Stream.start,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens fed one at a time.")] = Stream.tokens,
    every: Annotated[int, typer.Option("--every", help="Judge every so many predictions.")] = Stream.every,
    windows: console.WindowsOption = 1,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Loss of a long text read one token at a time through evicting caches, against recomputing the last tokens."""
    stream = Stream(start=start, tokens=tokens, every=every, chunk=budget)
    text = texts.read(dataset, column=column)
    loaded = models.load(model, device=device, dtype=dtype)
    cache = specs.check(cache, loaded.model)
    cut = texts.windows(loaded.tokenizer, text, length=stream.length, count=windows)
    runner.run(Streaming(loaded, cache, seed, texts.told(text, cut), ids=cut.ids, stream=stream, budget=budget), out)


if __name__ == "__main__":
    console.run(main)
