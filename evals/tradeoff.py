"""Quality, memory and speed of every cache on one model: `python -m evals.tradeoff`, a table, a report and a picture.

It puts the pieces of two other evals on one picture. Must never measure in a way of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from evals import console, figure, models, perplexity, report, runner, specs, speeds, texts, throughput
from evals.perplexity import Perplexity
from evals.runner import Eval, Piece
from evals.teacher import Protocol
from evals.throughput import Throughput, Timing

DEFAULT_CACHES = [
    "dense",
    "int8",
    "fp8",
    "int4",
    "int3",
    "int2",
    "window:window=512",
    "streaming:sinks=4,window=508",
    "streaming:sinks=4,window=508+int4",
    "minicache",
    "minicache+int4",
    "transformers:fp8",
    "transformers:hqq4",
]
# Of the embedded model alone: layers that share by the plan that `evals.sharing` found, beside as many neighbours.
EMBEDDED_CACHES = [
    "shared:groups=14-15/16-17/18-19/20-21/22-23/24-25/26-27/28-29",
    "shared:plan=docs/sharing/plan.json",
    "shared:plan=docs/sharing/plan.json+int4",
]


@dataclass
class Tradeoff(Eval):
    """Everything of `reading`, and of `timing` the time of a decoded token, where that is wanted."""

    reading: Perplexity = None
    timing: Throughput | None = None

    name: ClassVar[str] = "tradeoff"
    title: ClassVar[str] = "Quality against memory"

    def protocol(self) -> dict:
        return {**self.reading.protocol(), "decode_tokens": self.timing.tokens[0] if self.timing else 0}

    def pieces(self) -> list[Piece]:
        return self.reading.pieces() + (self.timing.pieces() if self.timing else [])

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        return (self.timing if piece.timed else self.reading).measure(piece, tick)

    def results(self, records: dict[str, dict]) -> list[dict]:
        entries = self.reading.results(records)
        if self.timing:
            timed = {entry["spec"]: entry["decode"][0] for entry in self.timing.results(records)}
            for entry in entries:
                entry["decode"] = timed.get(entry["spec"])
        return entries

    def tables(self, result: dict) -> list[report.Table]:
        table = perplexity.quality_table(result)
        if not self.timing:
            return [table]
        cells = [
            [*row, speeds.ratio_cell(entry["decode"])]
            for row, entry in zip(table.cells, result["results"], strict=True)
        ]
        return [report.Table(table.title, [*table.heads, "decode"], cells)]

    def notes(self, result: dict) -> list[str]:
        return perplexity.NOTES + (throughput.DECODE_NOTES if self.timing else [])

    def draw(self, result: dict, path: Path) -> None:
        figure.tradeoff(result, path)


def main(
    cache: console.CacheOption = None,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    prefill: Annotated[int, typer.Option("--prefill", help="Tokens of prompt, fed at once.")] = Protocol.prefill,
    step: Annotated[int, typer.Option("--step", help="Tokens fed at a time after it.")] = Protocol.step,
    length: Annotated[int, typer.Option("--length", help="Tokens in a window.")] = Protocol.length,
    windows: console.WindowsOption = 1,
    decode_tokens: Annotated[
        int, typer.Option("--decode-tokens", min=0, help="Tokens in the cache while decoding is timed; 0 skips it.")
    ] = 4096,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Measures what each cache costs in quality and saves in memory, and how fast it decodes, against DynamicCache."""
    protocol = Protocol(prefill=prefill, step=step, length=length)
    text = texts.read(dataset, column=column)
    if not cache:
        cache = DEFAULT_CACHES + (EMBEDDED_CACHES if model == models.EMBEDDED else [])
    loaded, cache = perplexity.prepare(model, cache, device, dtype, length)
    cut = texts.windows(loaded.tokenizer, text, length=length, count=windows)
    about = (loaded, cache, seed, texts.told(text, cut))
    # What is made of a context can't be filled by hand, so it is not timed.
    timed = [spec for spec in cache if not specs.reads_context(spec)]
    clocked = (loaded, timed, seed, texts.told(text, cut))
    timing = Throughput(*clocked, tokens=[decode_tokens], timing=Timing(rounds=5, steps=4)) if decode_tokens else None
    runner.run(Tradeoff(*about, reading=Perplexity(*about, ids=cut.ids, steps=protocol), timing=timing), out)


if __name__ == "__main__":
    console.run(main)
