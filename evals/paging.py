"""What sharing pages saves: `python -m evals.paging`, against DynamicCache in the same run.

Beams and samples from one prompt, a second request that begins like the first, and how much of a pool lies idle. Both
caches get the same tokens, and must give the same ones back.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from transformers import DynamicCache

import kvplug
from evals import console, figure, held, models, runner, specs, texts
from evals.errors import InputError
from evals.models import Loaded
from evals.report import Table
from evals.runner import Eval, Piece
from evals.throughput import first_token, synchronize

PAGED = "paged"
FIGURES = {
    "beam_step": "beam step",
    "beam_call": "whole beam call",
    "first_token": "first token of a second request",
    "sample_bytes": "bytes of all samples, of one",
    "reorder": "reordering, of a step",
    "idle": "idle part of a pool",
}
NOTES = [
    "**beam step** is the median time between two forwards of a beam search, **whole beam call** all of it, prompt and "
    "`kvplug.prefill` included; both as ratios to `DynamicCache` in the same round, whose prompt `generate` runs once "
    "for each beam. **reordering** is the time in `reorder_cache` as a share of the cache's own step.",
    "**first token of a second request**: from the prompt to its first token when it begins like one that the pool "
    "remembers, as a ratio to running all of it through a new `DynamicCache`.",
    "**bytes of all samples** are those held at the end by all samples of one prompt, as a ratio to one sample alone "
    "with the same kind of cache.",
    "**idle part of a pool**: bytes of its buffers that hold no token, with a cache for each of several requests of "
    "different lengths, which needs no padding. A batch that is padded stores its padding, as in every cache here.",
]


@dataclass(frozen=True)
class Load:
    """What is asked for: `tokens` of prompt, of which the part `shared` is that of an earlier request."""

    tokens: int = 2048
    new: int = 24
    beams: int = 4
    samples: int = 8
    sampled: int = 64
    shared: float = 0.9
    page_size: int = 16
    rounds: int = 3

    def __post_init__(self) -> None:
        least = {"tokens": 64, "new": 4, "beams": 2, "samples": 2, "sampled": 1, "page_size": 1, "rounds": 1}
        for name, value in least.items():
            if getattr(self, name) < value:
                raise InputError(f"--{name.replace('_', '-')}: got {getattr(self, name)}, accepted is {value} or more")
        if not 0 < self.shared < 1:
            raise InputError(f"--shared: got {self.shared}, accepted is between 0 and 1")

    @property
    def lengths(self) -> list[int]:
        """Lengths of the requests of a mixed pool."""
        return [self.tokens, self.tokens * 3 // 4 - 5, self.tokens // 2 + 3, self.tokens // 5 + 1]


class Watched:
    """Times the forwards of a model and the reorderings of a cache."""

    def __init__(self, model, cache):
        self.model, self.cache = model, cache
        self.starts: list[float] = []
        self.reorders: list[float] = []

    def __enter__(self) -> "Watched":
        self.hook = self.model.register_forward_pre_hook(lambda *_: self.starts.append(self.now()))
        reorder = self.cache.reorder_cache

        def timed(beam_idx):
            start = self.now()
            reorder(beam_idx)
            self.reorders.append(self.now() - start)

        self.cache.reorder_cache = timed
        return self

    def now(self) -> float:
        synchronize(self.model.device)
        return time.perf_counter()

    def __exit__(self, *_) -> None:
        self.hook.remove()
        del self.cache.reorder_cache

    @property
    def step(self) -> float:
        # The first one has the prompt behind it.
        gaps = [later - sooner for sooner, later in zip(self.starts, self.starts[1:], strict=False)]
        return statistics.median(gaps[1:])


@dataclass
class Paging(Eval):
    """Runs `ids` `[2, tokens]`, two prompts, in the ways of `Load`; a piece is one way and one round, both caches."""

    ids: torch.Tensor = None
    load: Load = field(default_factory=Load)

    name: ClassVar[str] = "paging"
    title: ClassVar[str] = "What sharing pages saves"
    unit: ClassVar[str] = "run"

    def protocol(self) -> dict:
        return asdict(self.load)

    def pieces(self) -> list[Piece]:
        timed = [(way, i) for i in range(self.load.rounds) for way in ("beams", "prefix")]
        ways = [*timed, ("samples", 0), ("idle", 0)]
        return [Piece(f"{way}, round {i + 1}", 2, (way, i), timed=True) for way, i in ways]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """What each of the two caches takes, by spec."""
        way, number = piece.of
        # In turn, so that neither always goes first.
        order = [specs.REFERENCE, PAGED] if number % 2 == 0 else [PAGED, specs.REFERENCE]
        found = {}
        for spec in order:
            with specs.routed(spec, self.loaded.model):
                found[spec] = getattr(self, f"_{way}")(spec)
            tick(1)
        if way == "beams" and found[PAGED]["text"] != found[specs.REFERENCE]["text"]:
            raise RuntimeError("the two caches wrote different texts, so their times can't be compared")
        return found

    @property
    def prompt(self) -> torch.Tensor:
        return self.ids[:1].to(self.loaded.model.device)

    def _pool(self) -> kvplug.PagePool:
        return kvplug.PagePool(self.loaded.model, self.load.page_size)

    def _cache(self, spec: str, rows: int, prompt: torch.Tensor):
        """A cache for `generate` over `rows` rows of a prompt; a paged one has run it."""
        if spec == specs.REFERENCE:
            return DynamicCache(config=self.loaded.model.config)
        cache = kvplug.PagedCache(self.loaded.model, pool=self._pool())
        return kvplug.prefill(self.loaded.model, prompt, cache, rows=rows)

    def _generate(self, cache, prompt: torch.Tensor, new: int, **options) -> torch.Tensor:
        return self.loaded.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            pad_token_id=0,
            **options,
        )

    def _beams(self, spec: str) -> dict:
        load, model = self.load, self.loaded.model
        synchronize(model.device)
        start = time.perf_counter()
        cache = self._cache(spec, load.beams, self.prompt)
        with Watched(model, cache) as watched:
            text = self._generate(cache, self.prompt, load.new, num_beams=load.beams, do_sample=False)
        synchronize(model.device)
        total = time.perf_counter() - start
        return {
            "step": watched.step,
            "call": total,
            "reorder": statistics.median(watched.reorders),
            "memory": held.counted(cache, model, cache.get_seq_length()),
            "text": text[0, load.tokens :].tolist(),
        }

    def _prefix(self, spec: str) -> dict:
        """The second prompt begins like the first, up to the shared part."""
        load, model = self.load, self.loaded.model
        cut = int(load.shared * load.tokens)
        second = torch.cat([self.prompt[:, :cut], self.ids[1:, cut:].to(self.prompt.device)], dim=1)
        if spec == specs.REFERENCE:
            seconds, logits = first_token(model, second, DynamicCache(config=model.config))
            return {"seconds": seconds, "token": int(logits.argmax())}
        pool = self._pool()
        before = kvplug.prefill(model, self.prompt, pool.open(self.prompt))
        pool.keep(before)
        del before
        synchronize(model.device)
        start = time.perf_counter()
        cache = pool.open(second)
        known = cache.get_seq_length()
        _, logits = first_token(model, second[:, known:], cache)
        return {"seconds": time.perf_counter() - start, "known": known, "token": int(logits.argmax())}

    def _samples(self, spec: str) -> dict:
        load = self.load
        sizes = []
        for count in (load.samples, 1):
            cache = self._cache(spec, count, self.prompt)
            self._generate(cache, self.prompt, load.sampled, do_sample=True, num_return_sequences=count)
            sizes.append(held.counted(cache, self.loaded.model, cache.get_seq_length())["held_bytes"])
        return {"bytes": sizes[0], "one": sizes[1]}

    def _idle(self, spec: str) -> dict:
        """Bytes that are held, and those that tokens take, for one cache of each length."""
        model, load = self.loaded.model, self.load
        if spec == specs.REFERENCE:
            return {}
        pool = self._pool()
        caches = []
        for length in load.lengths:
            cache = kvplug.PagedCache(model, pool=pool)
            kvplug.prefill(model, self.prompt[:, :length], cache)
            caches.append(cache)
        used = sum(cache.memory().used for cache in caches)
        return {"held": pool.nbytes, "used": used, "lengths": load.lengths}

    def results(self, records: dict[str, dict]) -> list[dict]:
        by_way: dict[str, list[dict]] = {}
        for piece in self.pieces():
            by_way.setdefault(piece.of[0], []).append(records[piece.key])
        entries = []
        for spec in (specs.REFERENCE, PAGED):
            beams, prefix = ([(one[spec], one[specs.REFERENCE]) for one in by_way[way]] for way in ("beams", "prefix"))
            [samples], [idle] = ([one[spec] for one in by_way[way]] for way in ("samples", "idle"))
            figures = {
                "beam_step": [own["step"] / full["step"] for own, full in beams],
                "beam_call": [own["call"] / full["call"] for own, full in beams],
                "reorder": [own["reorder"] / own["step"] for own, _ in beams],
                "first_token": [own["seconds"] / full["seconds"] for own, full in prefix],
                "sample_bytes": [samples["bytes"] / samples["one"]],
                "idle": [1 - idle["used"] / idle["held"]] if idle else [],
            }
            entries.append(
                {
                    "spec": spec,
                    "figures": figures,
                    "step_seconds": [own["step"] for own, _ in beams],
                    "call_seconds": [own["call"] for own, _ in beams],
                    "first_token_seconds": [own["seconds"] for own, _ in prefix],
                    "known_tokens": [own.get("known", 0) for own, _ in prefix],
                    "same_first_token": all(own["token"] == full["token"] for own, full in prefix),
                    "memory": beams[-1][0]["memory"],
                }
            )
        return entries

    def tables(self, result: dict) -> list[Table]:
        heads = ["cache", *FIGURES.values(), "bytes held by the beams"]
        cells = [
            [
                entry["spec"],
                *(_told(entry["figures"][name], name) for name in FIGURES),
                f"{entry['memory']['held_bytes']:,}",
            ]
            for entry in result["results"]
        ]
        return [Table(self.title, heads, cells)]

    def notes(self, result: dict) -> list[str]:
        load = self.load
        asked = (
            f"Prompts of {load.tokens:,} tokens; {load.beams} beams and {load.new} new tokens; {load.samples} samples "
            f"of {load.sampled} tokens; {load.shared:.0%} of the second request are the first's; requests of "
            f"{', '.join(f'{n:,}' for n in load.lengths)} tokens in one pool; pages of {load.page_size} tokens; "
            f"{load.rounds} rounds, median and spread."
        )
        return [asked, *NOTES]

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def _told(values: list[float], name: str) -> str:
    if not values:
        return ""
    middle = statistics.median(values)
    if name in ("reorder", "idle"):
        return f"{middle:.1%}"
    return f"{middle:.2f}" if len(values) == 1 else f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"


def draw(result: dict, path: Path) -> None:
    """Draws the ratios of both caches as bars to a PNG file at `path`."""
    names = ["beam_step", "beam_call", "first_token", "sample_bytes"]
    model = Path(result["model"]["name"]).name
    drawn, (axes,) = figure.canvas(f"{model}: pages that are shared", height=4.2)
    for index, entry in enumerate(result["results"]):
        middle = [statistics.median(entry["figures"][name]) for name in names]
        places = [place + 0.38 * index for place in range(len(names))]
        color = figure.line_style(index)["color"]
        bars = axes.barh(places, middle, height=0.36, color=color, label=entry["spec"], hatch="//" if index else None)
        axes.bar_label(bars, [f"{x:.2f}" for x in middle], padding=4, fontsize=10)
    axes.set_yticks([place + 0.19 for place in range(len(names))], [FIGURES[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("ratio to DynamicCache in the same run; of bytes, to one sample (↓ better)", fontsize=11)
    axes.legend(frameon=False, fontsize=10)
    figure.save(drawn, path)


def main(
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    tokens: Annotated[int, typer.Option("--tokens", help="Tokens of a prompt.")] = Load.tokens,
    new: Annotated[int, typer.Option("--new", help="Tokens that a beam search writes.")] = Load.new,
    beams: Annotated[int, typer.Option("--beams", help="Beams.")] = Load.beams,
    samples: Annotated[int, typer.Option("--samples", help="Samples from one prompt.")] = Load.samples,
    sampled: Annotated[int, typer.Option("--sampled", help="Tokens of a sample.")] = Load.sampled,
    shared: Annotated[float, typer.Option("--shared", help="Part of the second prompt that is known.")] = Load.shared,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens of a page.")] = Load.page_size,
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that each cache gets.")] = Load.rounds,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Times and weighs beams, samples and a repeated prompt in pages against DynamicCache."""
    load = Load(tokens, new, beams, samples, sampled, shared, page_size, rounds)
    text = texts.read(dataset, column=column)
    loaded: Loaded = models.load(model, device=device, dtype=dtype)
    cut = texts.windows(loaded.tokenizer, text, length=tokens, count=2)
    runner.run(Paging(loaded, [PAGED], seed, texts.told(text, cut), ids=cut.ids, load=load), out)


if __name__ == "__main__":
    console.run(main)
