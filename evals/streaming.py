"""Whether a stream without end stays readable: `python -m evals.streaming`, one token at a time through a small cache.

The yardstick is the one of the StreamingLLM paper: recomputing the last tokens afresh for each prediction, far too slow
to serve. Must never compare losses at different positions.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from evals import console, models, report, specs, texts
from evals.errors import InputError
from evals.models import Loaded, forward
from evals.report import Rows

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


def measure(
    loaded: Loaded,
    ids: torch.Tensor,
    caches: list[str],
    stream: Stream,
    budget: int,
    tick: Callable[[int], object] = lambda tokens: None,
) -> list[dict]:
    """Loss of each cache and of recomputing, at the same positions of `ids` `[windows, length]`."""
    judged = stream.judged(budget)
    if not judged:
        raise InputError(f"--tokens: got {stream.tokens}, accepted is more than two budgets ({2 * budget})")
    results = []
    for spec in [AFRESH, *caches]:
        parts = []
        for window in ids.to(loaded.model.device).split(1):
            if spec == AFRESH:
                parts.append(recomputed(loaded, window, budget, judged, tick))
                continue
            with specs.routed(spec, loaded.model):
                cache = specs.build(spec, loaded.model, capacity=stream.length)
                parts.append(streamed(loaded, window, cache, stream, judged, tick))
        loss = torch.stack(parts).double().mean(dim=1)
        results.append(
            {
                "spec": spec,
                "loss": loss.mean().item(),
                "perplexity": loss.mean().exp().item(),
                "perplexity_by_window": loss.exp().tolist(),
                "predictions": len(judged) * len(parts),
            }
        )
    for entry in results:
        entry["loss_above_afresh"] = entry["loss"] - results[0]["loss"]
    return results


def table(results: list[dict]) -> Rows:
    """The results as rows of text."""
    heads = ["cache", "perplexity", "by window", "nats above afresh", "predictions"]
    cells = [
        [
            entry["spec"],
            f"{entry['perplexity']:.2f}",
            ", ".join(f"{x:.2f}" for x in entry["perplexity_by_window"]),
            f"{entry['loss_above_afresh']:+.3f}",
            str(entry["predictions"]),
        ]
        for entry in results
    ]
    return Rows("A stream through a small cache", heads, cells)


def main(
    cache: console.CacheOption = ["streaming:sinks=4,window=252", "window:window=256"],  # noqa: B006
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    budget: Annotated[int, typer.Option("--budget", min=1, help="Tokens recomputed afresh for each prediction.")] = 256,
    start: Annotated[int, typer.Option("--start", help="Tokens fed in chunks before the measurement.")] = Stream.start,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens fed one at a time.")] = Stream.tokens,
    every: Annotated[int, typer.Option("--every", help="Judge every so many predictions.")] = Stream.every,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows, spread over the text.")] = 1,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md and report.json.")] = Path(
        "results/streaming"
    ),
) -> None:
    """Loss of a long text read one token at a time through evicting caches, against recomputing the last tokens."""
    stream = Stream(start=start, tokens=tokens, every=every, chunk=budget)
    text = texts.read(dataset, column=column)
    torch.manual_seed(seed)
    loaded = models.load(model, device=device, dtype=dtype)
    cache = specs.check(cache, loaded.model)
    cut = texts.windows(loaded.tokenizer, text, length=stream.length, count=windows)
    total = windows * (len(stream.judged(budget)) + len(cache) * (stream.length - 1))
    with console.progress(total, "Streaming", "token") as bar:
        results = measure(loaded, cut.ids, cache, stream, budget, bar.update)
    result = report.result(
        "streaming",
        loaded,
        seed=seed,
        protocol={**asdict(stream), "budget": budget, "windows": windows},
        text={"source": text.source, "sha256": text.sha256, "tokens": cut.total, "starts": list(cut.starts)},
        results=results,
    )
    rows = table(results)
    report.write(result, rows, out, notes=NOTES)
    console.show(report.rich_table(rows))
    print(f"Written to {out}: report.md, report.json")


if __name__ == "__main__":
    console.run(main)
