"""Bytes, foretold and found: `python -m evals.memory`, steady and peak, over lengths and batches.

The plan is made before anything is allocated, the count is taken from outside after real text went through the model.
Must never take one figure for the other, nor count as a cache's own what the case before it left behind.
"""

import ctypes
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import psutil
import torch
import typer
from matplotlib.ticker import FuncFormatter, NullLocator

import kvplug
from evals import console, figure, held, models, report, runner, specs, texts
from evals.errors import InputError, first_line
from evals.models import forward
from evals.runner import Eval, Piece

DEFAULT_CACHES = ["dense", "int8", "int4", "streaming:sinks=4,window=508"]
MIB = 2**20
# What is loaded, compiled or paged in by the first forward of all belongs to no cache: these tokens go ahead.
WARMUP = 8
# Lengths that a planned line is drawn through, beside the measured ones: enough to see buffers grow in steps.
CURVE = 192
# glibc's name, in malloc.h, for the size from which a block comes from the system by itself and goes back when freed.
M_MMAP_THRESHOLD, OWN_BLOCK = -3, 128 * 1024
NOTES = [
    "**predicted** is `kvplug.plan(config, cache, tokens, batch).total`, known before anything is allocated; **held** "
    "is counted from outside once the tokens are in: every tensor storage that can be reached from the cache object, "
    "once. **agrees** says whether the two are the same to the byte. transformers' own caches come without a plan.",
    "**ratio** is held over what transformers' DynamicCache holds in full precision for the same tokens. Buffers grow "
    "by slabs, so that a short context pays for room that it does not use yet.",
]
PEAK_NOTES = {
    "cuda": "**peaks** are the allocator's highest count above what was allocated before the case: over the prompt's "
    "forward, whose activations are the same for all caches, and apart from it over the tokens decoded after it.",
    "cpu": "**peaks** are the highest resident set (RSS) that a thread saw, looking every {every:.0f} ms, above the "
    "one before the case: over the prompt's forward, whose activations are the same for all caches, and apart from it "
    "over the tokens decoded after it. Where the C library is glibc, large blocks go back to the system once they are "
    "freed, so that peaks of one case differ by a few MiB between runs; elsewhere RSS also shows what the memory "
    "allocator keeps for later, tens of MiB and more. A rise that is over within those {every:.0f} ms may go unseen.",
}


class ResidentPeak:
    """The most memory that this process has resident while the body runs, in bytes; a thread looks every `every` s."""

    def __init__(self, every: float = 0.002):
        self.every = every
        self.peak = 0
        self._process = psutil.Process()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ResidentPeak":
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        self._thread.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(self.every):
            self._look()

    def _look(self) -> None:
        self.peak = max(self.peak, self._process.memory_info().rss)


def c_library(name: str) -> Callable[..., int] | None:
    """A function of glibc; None where the C library is another one."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError, TypeError):
        return None


def give_back_at_once() -> None:
    """From now on a large block that is freed leaves the resident set, for the price of some speed.

    Otherwise the allocator keeps it for the next one, and what a case needs depends on which case came before.
    """
    if mallopt := c_library("mallopt"):
        mallopt(M_MMAP_THRESHOLD, OWN_BLOCK)


def release() -> None:
    """Frees what nothing refers to any more, and gives it back to the system where the C library can."""
    gc.collect()
    if malloc_trim := c_library("malloc_trim"):
        malloc_trim(0)


def in_use(devices: list[torch.device]) -> dict[torch.device, int]:
    """Bytes in use now: what each device's allocator gave out, or what the process has resident for the CPU."""
    release()
    return {
        device: psutil.Process().memory_info().rss if device.type == "cpu" else held.start_peak(device)
        for device in devices
    }


def peak_above(before: dict[torch.device, int], work: Callable[[], Any]) -> int | None:
    """The most bytes in use while `work` runs, above `before`; None where a device's allocator keeps no count.

    The peaks of several devices are added up, though each may have come at another time.
    """
    release()
    for device in before:
        held.start_peak(device)
    with ResidentPeak() as resident:
        work()
    peaks = [
        max(resident.peak - start, 0) if device.type == "cpu" else held.peak_since(device, start)
        for device, start in before.items()
    ]
    return None if None in peaks else sum(peaks)


@dataclass
class Memory(Eval):
    """A prompt of `ids` `[windows, tokens]`, then tokens one by one; a piece is one cache at one length and batch."""

    ids: torch.Tensor = None
    lengths: tuple[int, ...] = (512, 1024)
    batches: tuple[int, ...] = (1, 2)
    new_tokens: int = 16

    name: ClassVar[str] = "memory"
    title: ClassVar[str] = "Memory, predicted and measured"

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Prompt length and batch of each case, in the order of their tables."""
        return [(length, batch) for batch in self.batches for length in self.lengths]

    def protocol(self) -> dict:
        return {"lengths": list(self.lengths), "batches": list(self.batches), "new_tokens": self.new_tokens}

    def pieces(self) -> list[Piece]:
        return [
            Piece(key(spec, length, batch), (length + self.new_tokens) * batch, (spec, length, batch))
            for length, batch in self.cases
            for spec in self.order
        ]

    @torch.no_grad()
    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """The plan for one case, what the cache then holds, and the peaks on the way."""
        spec, length, batch = piece.of
        model, tokens = self.loaded.model, length + self.new_tokens
        ids = self.ids[:batch, :tokens].to(model.device)
        planned, refused = self.plan(spec, tokens, batch)
        with specs.routed(spec, model):
            self.feed(ids[:, : WARMUP + 1], specs.build(spec, model, capacity=WARMUP + 1), WARMUP)
            before = in_use(sorted({parameter.device for parameter in model.parameters()}, key=str))
            cache = specs.build(spec, model, capacity=tokens)
            prompt = peak_above(before, lambda: self.feed(ids[:, :length], cache, length, tick))
            decoding = peak_above(before, lambda: self.feed(ids[:, length:], cache, 0, tick))
            memory = held.counted(cache, model, tokens * batch)
        return {
            "predicted_bytes": planned,
            "refused": refused,
            "memory": memory,
            "peak_prompt_bytes": prompt,
            "peak_decoding_bytes": decoding,
        }

    def feed(self, ids: torch.Tensor, cache, at_once: int, tick=lambda tokens: None) -> None:
        """The first `at_once` tokens of `ids` `[batch, tokens]` in one forward, the others one at a time."""
        first = [ids[:, :at_once]] if at_once else []
        for block in [*first, *ids[:, at_once:].split(1, dim=1)]:
            if block.shape[1]:
                forward(self.loaded.model, block, cache, logits_to_keep=1)
                tick(block.numel())

    def plan(self, spec: str, tokens: int, batch: int) -> tuple[int | None, str | None]:
        """Bytes as kvplug foretells them; none, and why, where it does not."""
        if specs.is_baseline(spec):
            return None, None
        model = self.loaded.model
        try:
            return kvplug.plan(model.config, spec, tokens, batch, dtype=model.dtype).total, None
        except ValueError as error:
            return None, first_line(error)

    def results(self, records: dict[str, dict]) -> list[dict]:
        return [self.entry(spec, records) for spec in self.order]

    def entry(self, spec: str, records: dict[str, dict]) -> dict:
        """One cache in all cases; `memory` is that of the largest."""
        own = {case: records[key(spec, *case)] for case in self.cases}
        full = {case: records[key(specs.REFERENCE, *case)] for case in self.cases}
        largest = max(self.cases, key=lambda case: (case[0] + self.new_tokens) * case[1])
        return {
            "spec": spec,
            "cases": [self.case(case, own[case], full[case]["memory"]["held_bytes"]) for case in self.cases],
            "planned": self.curves(spec),
            "refused": own[largest]["refused"],
            "memory": held.beside(own[largest]["memory"], full[largest]["memory"]),
        }

    def case(self, case: tuple[int, int], record: dict, full: int) -> dict:
        """One cache at one length and batch, beside full precision's bytes."""
        held_bytes, predicted = record["memory"]["held_bytes"], record["predicted_bytes"]
        return {
            "length": case[0],
            "batch": case[1],
            "tokens": case[0] + self.new_tokens,
            "predicted_bytes": predicted,
            "held_bytes": held_bytes,
            "agrees": None if predicted is None else predicted == held_bytes,
            "full_bytes": full,
            "ratio": held_bytes / full,
            "peak_prompt_bytes": record["peak_prompt_bytes"],
            "peak_decoding_bytes": record["peak_decoding_bytes"],
        }

    def curves(self, spec: str) -> list[dict]:
        """What is foretold between the measured lengths as well, for each batch."""
        low, high = (pick(self.lengths) + self.new_tokens for pick in (min, max))
        between = range(low, high, max((high - low) // CURVE, 1))
        tokens = sorted({*between, *(length + self.new_tokens for length in self.lengths)})
        found = []
        for batch in self.batches:
            planned = [self.plan(spec, count, batch)[0] for count in tokens]
            if None not in planned:
                found.append(
                    {"batch": batch, "points": corners([list(pair) for pair in zip(tokens, planned, strict=True)])}
                )
        return found

    def tables(self, result: dict) -> list[report.Table]:
        return [table(result, index) for index in range(len(self.cases))]

    def notes(self, result: dict) -> list[str]:
        kinds = {parameter.device.type for parameter in self.loaded.model.parameters()}
        peaks = [PEAK_NOTES[kind].format(every=1000 * ResidentPeak().every) for kind in PEAK_NOTES if kind in kinds]
        refused = [entry for entry in result["results"] if entry["refused"]]
        return [*NOTES, *peaks, *(f"`{entry['spec']}` is not predicted: {entry['refused']}." for entry in refused)]

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def corners(points: list[list[int]]) -> list[list[int]]:
    """`points` without those that lie between two of the same height."""
    inner = zip(points, points[1:], points[2:], strict=False)
    kept = [point for before, point, after in inner if not before[1] == point[1] == after[1]]
    return [points[0], *kept, *points[1:][-1:]]


def key(spec: str, length: int, batch: int) -> str:
    """A piece's name."""
    return f"{length} x {batch}, {spec}"


def table(result: dict, index: int) -> report.Table:
    """All caches in the case of that index."""
    heads = ["cache", "predicted bytes", "held bytes", "agrees", "ratio", "peak of prompt, MiB", "of decoding, MiB"]
    cells = []
    for entry in result["results"]:
        case = entry["cases"][index]
        predicted, peaks = case["predicted_bytes"], (case["peak_prompt_bytes"], case["peak_decoding_bytes"])
        cells.append(
            [
                entry["spec"],
                "" if predicted is None else f"{predicted:,}",
                f"{case['held_bytes']:,}",
                {None: "", True: "yes", False: f"NO: {case['held_bytes'] - (predicted or 0):+,}"}[case["agrees"]],
                f"{case['ratio']:.3f}",
                *("" if peak is None else f"{peak / MIB:,.0f}" for peak in peaks),
            ]
        )
    rows = f"{case['batch']} row{'s' if case['batch'] > 1 else ''}"
    title = f"{rows} of {case['tokens']:,} tokens: full precision holds {case['full_bytes']:,} bytes"
    return report.Table(title, heads, cells)


def draw(result: dict, path: Path) -> None:
    """Draws bytes held against the context, a panel for each batch: points are measured, lines are planned."""
    model = Path(result["model"]["name"]).name
    batches = result["protocol"]["batches"]
    title = f"{model}: what a cache holds (points: measured, lines: predicted before anything is allocated)"
    drawn, panels = figure.canvas(title, columns=len(batches), width=4.5 + 3.8 * len(batches), height=4.8)
    tokens = sorted({case["tokens"] for case in result["results"][0]["cases"]})
    for axes, batch in zip(panels, batches, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        for index, entry in enumerate(result["results"]):
            style = figure.line_style(index)
            cases = [case for case in entry["cases"] if case["batch"] == batch]
            # Where two caches hold the same, the second must not hide the first: markers are hollow and shrink.
            marks = {**style, "linestyle": "none", "markerfacecolor": "none", "markersize": 11 - 1.2 * min(index, 5)}
            spots = [case["tokens"] for case in cases], [case["held_bytes"] / MIB for case in cases]
            axes.plot(*spots, label=figure.label_of(entry["spec"]), markeredgewidth=1.6, zorder=3, **marks)
            for curve in (curve for curve in entry["planned"] if curve["batch"] == batch):
                line = [(count, planned / MIB) for count, planned in curve["points"]]
                axes.plot(*zip(*line, strict=True), color=style["color"], linewidth=1.4, zorder=2)
        axes.set_title(f"batch {batch}", loc="left", fontsize=11)
        axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel("tokens in the cache, of each row", fontsize=11)
    limits = [axes.get_ylim() for axes in panels]
    for axes in panels:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    panels[0].set_ylabel("MiB held (↓ better)", fontsize=11)
    panels[-1].legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)


def positive(option: str, values: list[int]) -> tuple[int, ...]:
    """`values` in order and without repetitions, each of them at least 1."""
    for value in values:
        if value < 1:
            raise InputError(f"{option}: got {value}, accepted is 1 or more")
    return tuple(sorted(set(values)))


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    length: Annotated[list[int], typer.Option("--length", help="Tokens of prompt; repeatable.")] = [512, 1024],  # noqa: B006
    batch: Annotated[list[int], typer.Option("--batch", help="Rows, each another window; repeatable.")] = [1, 2],  # noqa: B006
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="Tokens decoded one at a time after it.")] = 16,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Bytes that each cache holds, predicted and measured, and the peaks of memory on the way there."""
    lengths, batches = positive("--length", length), positive("--batch", batch)
    positive("--new-tokens", [new_tokens])
    give_back_at_once()
    longest = max(lengths) + new_tokens
    text = texts.read(dataset, column=column)
    loaded = models.load(model, device=device, dtype=dtype)
    if loaded.max_positions is not None and longest > loaded.max_positions:
        raise InputError(
            f"--length: got {max(lengths):,}, accepted is up to the model's {loaded.max_positions:,} positions less "
            f"--new-tokens {new_tokens}"
        )
    cache = specs.check(cache, loaded.model)
    cut = texts.windows(loaded.tokenizer, text, length=longest, count=max(batches))
    told = texts.told(text, cut)
    runner.run(Memory(loaded, cache, seed, told, cut.ids, lengths, batches, new_tokens), out)


if __name__ == "__main__":
    console.run(main)
