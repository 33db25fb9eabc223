"""Quality along a text: `python -m evals.perplexity`, perplexity, divergence and agreement by position.

The text is teacher-forced through each cache in small steps, so that every counted prediction reads back what the cache
stored. Must never compare across runs: the full cache that all others are judged by is measured in the same run.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer

from evals import console, figure, held, metrics, models, report, runner, specs, teacher, texts
from evals.errors import InputError
from evals.runner import Eval, Piece
from evals.teacher import Protocol, Scores
from kvplug import plan

DEFAULT_CACHES = ["int8", "fp8", "int4", "int3", "int2", "window:window=512", "streaming:sinks=4,window=508"]
NOTES = [
    "**KL** is KL(full cache ‖ this cache) in nats per token, **same top-1** the share of predictions with the same "
    "likeliest token. Both, and the perplexity, are taken over the tokens after the prompt, teacher-forced through the "
    "cache in small steps, so that every counted prediction reads back what was stored.",
    "**bits held** are all bytes that the cache object holds at the end (unique tensor storages reachable from it: "
    "scales, tables, full-precision residuals and spare capacity count), over all elements of K and V that a full "
    "cache has for the same tokens. A cache that drops tokens holds fewer bits for each element of the context.",
    "**bits stored** is what kvplug's `cache.memory()` tells for an element that is kept, scales included, spare "
    "capacity left out; **at 16 bits** is the same for a model that computes in 16 bits (planned, not measured), whose "
    "tokens in full precision are half as large.",
]


@dataclass
class Perplexity(Eval):
    """Reads `ids` `[windows, length]` through each cache; a piece is one window through one cache."""

    ids: torch.Tensor = None
    steps: Protocol = field(default_factory=Protocol)
    bins: int = 8
    # What `read_reference` found for the window that was read last: the predictions of all would fill the memory.
    _last: tuple[int, torch.Tensor, dict] | None = None

    name: ClassVar[str] = "perplexity"
    title: ClassVar[str] = "Quality by position"

    def protocol(self) -> dict:
        return {**asdict(self.steps), "windows": len(self.ids), "bins": self.bins}

    def pieces(self) -> list[Piece]:
        windows = range(len(self.ids))
        return [Piece(f"window {i}, {spec}", self.steps.fed, (spec, i)) for i in windows for spec in self.order]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """Figures of one window's predictions, and what the cache holds at the end."""
        spec, index = piece.of
        window = self.ids[index : index + 1].to(self.loaded.model.device)
        if spec == specs.REFERENCE:
            against, memory = self.read_reference(index, window, tick)
            return {"scores": itself(against, window, self.steps).lists(), "memory": memory}
        against, _ = self.read_reference(index, window)
        read, memory = self.read(
            spec,
            lambda cache: teacher.score(self.loaded.model, window, cache, self.steps, against, tick),
            window[:, : self.steps.prefill],
        )
        return {"scores": read.lists(), "memory": memory}

    def read_reference(self, index: int, window: torch.Tensor, tick=lambda tokens: None) -> tuple[torch.Tensor, dict]:
        """The reference's log probabilities for a window, and its memory; read again only for another window."""
        if self._last is None or self._last[0] != index:
            self._last = None
            against, memory = self.read(
                specs.REFERENCE, lambda cache: teacher.reference(self.loaded.model, window, cache, self.steps, tick)
            )
            self._last = index, against, memory
        return self._last[1:]

    def read(self, spec: str, through: Callable, context: torch.Tensor | None = None) -> tuple[Any, dict]:
        """What `through` makes of a fresh cache, which may be made of `context`, and the memory that it then holds."""
        model = self.loaded.model
        with specs.routed(spec, model):
            before = held.start_peak(model.device)
            cache = specs.build(spec, model, capacity=self.steps.length, context=context)
            found = through(cache)
            memory = held.counted(cache, model, self.steps.fed)
            memory["peak_device_bytes"] = held.peak_since(model.device, before)
        return found, memory

    def results(self, records: dict[str, dict]) -> list[dict]:
        found = runner.by_spec(self, records, self.pieces())
        return [self.entry(spec, found[spec], found[specs.REFERENCE]) for spec in self.order]

    def entry(self, spec: str, records: list[dict], full: list[dict]) -> dict:
        """One cache: over all predictions, and over those of each of `bins` equal parts of the positions."""
        scores = [record["scores"] for record in records]
        count = self.steps.predictions
        bounds = sorted({round(i * count / self.bins) for i in range(self.bins + 1)})
        return {
            "spec": spec,
            "quality": summary(scores, 0, count),
            "by_position": [
                {"first": self.steps.prefill + low, "last": self.steps.prefill + high - 1, **summary(scores, low, high)}
                for low, high in itertools.pairwise(bounds)
            ],
            "memory": held.beside(records[-1]["memory"], full[-1]["memory"]) | {"bits_at_16": self.bits_at_16(spec)},
        }

    def bits_at_16(self, spec: str) -> float | None:
        """Bits stored for a scalar of K or V as if the model computed in 16 bits; None where there is no plan."""
        if specs.is_baseline(spec) or specs.reads_context(spec):
            return None
        return plan(self.loaded.model.config, spec, self.steps.fed, dtype=torch.bfloat16).bits_per_element

    def tables(self, result: dict) -> list[report.Table]:
        return [quality_table(result), position_table(result)]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def itself(against: torch.Tensor, window: torch.Tensor, protocol: Protocol) -> Scores:
    """The reference judged by itself: its perplexity, no divergence, and full agreement."""
    parts = against.split(64)
    targets = window[0, protocol.prefill + 1 :].split(64)
    return Scores.join([teacher.compare(part, part, target) for part, target in zip(parts, targets, strict=True)])


def summary(scores: list[dict], low: int, high: int) -> dict:
    """The metric over the predictions `low` to `high` of each window."""
    figures = {name: [x for one in scores for x in one[name][low:high]] for name in ("nll", "kl", "agree")}
    return metrics.load("teacher_forced").compute(**figures)


def quality_table(result: dict) -> report.Table:
    """Quality and memory of each cache, in the order they were asked for."""
    heads = ["cache", "perplexity", "KL", "same top-1", "bits held", "bits stored", "at 16 bits", "bytes / token"]
    peaks = any(entry["memory"]["peak_device_bytes"] for entry in result["results"])
    cells = []
    for entry in result["results"]:
        quality, memory = entry["quality"], entry["memory"]
        row = [
            entry["spec"],
            f"{quality['perplexity']:.3f}",
            f"{quality['kl']:.4f}",
            f"{quality['top1_agreement']:.3f}",
            f"{memory['bits_held']:.2f}",
            "" if memory["bits_stored"] is None else f"{memory['bits_stored']:.2f}",
            "" if memory["bits_at_16"] is None else f"{memory['bits_at_16']:.2f}",
            f"{memory['bytes_per_token']:,.0f}",
        ]
        row += [f"{memory['peak_device_bytes'] / 2**20:,.0f}"] if peaks else []
        cells.append(row)
    return report.Table("Quality against memory", heads + (["peak MiB"] if peaks else []), cells)


def position_table(result: dict) -> report.Table:
    """KL of each cache over each part of the positions."""
    parts = result["results"][0]["by_position"]
    heads = ["KL at positions", *(f"{part['first']:,}–{part['last']:,}" for part in parts)]
    cells = [[entry["spec"], *(f"{part['kl']:.4f}" for part in entry["by_position"])] for entry in result["results"]]
    return report.Table("Damage by position", heads, cells)


def draw(result: dict, path: Path) -> None:
    """Draws each cache's KL against the position, logarithmic, to a PNG file at `path`."""
    model = Path(result["model"]["name"]).name
    drawn, (axes,) = figure.canvas(f"{model}: damage along the text")
    axes.set_yscale("log")
    for index, entry in enumerate(result["results"]):
        middles = [(part["first"] + part["last"]) / 2 for part in entry["by_position"]]
        kls = [part["kl"] for part in entry["by_position"]]
        if max(kls) > 1e-7:  # an exact cache has no place on a logarithmic axis
            axes.plot(middles, kls, label=figure.label_of(entry["spec"]), **figure.line_style(index))
    axes.set_xlabel("position in the text, tokens", fontsize=11)
    axes.set_ylabel("KL to the full cache, nats per token (↓ better)", fontsize=11)
    if axes.lines:
        axes.legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)


def prepare(model: str, cache: list[str], device: str, dtype: str, length: int) -> tuple[models.Loaded, list[str]]:
    """Loads a model and checks that it can read `length` tokens, and the specs in `cache`, without repetitions.

    Raises:
        InputError: the model, a spec or the length is at fault.
    """
    loaded = models.load(model, device=device, dtype=dtype)
    if loaded.max_positions is not None and length > loaded.max_positions:
        raise InputError(f"--length: got {length:,}, accepted is up to the model's {loaded.max_positions:,} positions")
    return loaded, specs.check(cache, loaded.model, contexts=True)


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    prefill: Annotated[int, typer.Option("--prefill", help="Tokens of prompt, fed at once.")] = Protocol.prefill,
    step: Annotated[
        int, typer.Option("--step", help="Tokens fed at a time after it; 1 is true decoding.")
    ] = Protocol.step,
    length: Annotated[int, typer.Option("--length", help="Tokens in a window.")] = Protocol.length,
    windows: console.WindowsOption = 1,
    bins: Annotated[int, typer.Option("--bins", min=1, help="Parts of the positions that are told apart.")] = 8,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Perplexity, divergence and agreement with the full cache, by position, read back through each cache."""
    protocol = Protocol(prefill=prefill, step=step, length=length)
    text = texts.read(dataset, column=column)
    loaded, cache = prepare(model, cache, device, dtype, length)
    cut = texts.windows(loaded.tokenizer, text, length=length, count=windows)
    runner.run(Perplexity(loaded, cache, seed, texts.told(text, cut), ids=cut.ids, steps=protocol, bins=bins), out)


if __name__ == "__main__":
    console.run(main)
