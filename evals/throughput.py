"""Speed: `python -m evals.throughput`, prefill and decoding apart, as ratios to DynamicCache in the same run.

All caches are taken in turn, round after round, since a machine drifts by more than the differences between them. Must
never print a ratio for a cache whose output is wrong.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from transformers import Cache, PreTrainedModel

from evals import console, held, models, report, runner, specs, speeds, texts
from evals.errors import InputError
from evals.models import Loaded, forward
from evals.runner import Eval, Piece

DEFAULT_CACHES = [
    *("dense", "int8", "fp8", "int4", "int3", "int2"),
    *("transformers:static", "transformers:fp8", "transformers:hqq4"),
]
# A prompt this long gives the real keys and values that are repeated to fill a cache of any length.
TILE = 256
# What full precision may differ by in KL: sums are rounded in another order, which shows more in 16 bits.
EXACT_KL = {torch.float32: 1e-4}
EXACT_KL_16_BITS = 1e-2
DECODE_NOTES = [
    "**decode** is the time of one decoded token as a ratio to DynamicCache's in the same run: all caches are taken in "
    "turn, round after round; the median of the rounds, with the smallest and the largest. Below 1 is faster. Caches "
    "are filled by hand with real keys and values to the length that is named.",
    "A cache whose first decoded token is wrong (not finite, or different although nothing was compressed or dropped) "
    "gets no ratio.",
]
PREFILL_NOTE = (
    "**first token** is the time from a prompt to its first token, through a fresh cache, told in the same way. No "
    "cache changes a prompt's own attention, so one whose first prediction differs gets no ratio."
)


@dataclass(frozen=True)
class Timing:
    """How the clock is read: `rounds` turns of `steps` decoded tokens for each cache, after `warmup` unclocked ones."""

    rounds: int = 5
    steps: int = 8
    warmup: int = 2

    def __post_init__(self) -> None:
        for name in ("rounds", "steps", "warmup"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name}: got {getattr(self, name)}, accepted is 1 or more")

    @property
    def tokens(self) -> int:
        """Tokens that each cache decodes in all; the first is the one whose output is checked."""
        return 1 + self.warmup + self.rounds * self.steps


@dataclass
class Entrant:
    """One cache on its way through the rounds; `seconds` has one entry per round: of a token, or of a whole prompt."""

    spec: str
    cache: Cache | None = None
    kl: float = 0.0
    fault: str | None = None
    memory: dict = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Throughput(Eval):
    """Times all caches in turn; a piece is one length and batch, prefilled or decoded.

    Attributes:
        prompts: tokens of the prompts whose first token is timed; none skips it.
        tokens: tokens in the cache while decoding is timed.
        batches: rows.
    """

    prompts: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=lambda: [1])
    timing: Timing = field(default_factory=Timing)

    name: ClassVar[str] = "throughput"
    title: ClassVar[str] = "Time to first token and per output token"

    def __post_init__(self) -> None:
        for name, values, least in (
            ("prompt", self.prompts, 0),
            ("tokens", self.tokens, 1),
            ("batch", self.batches, 1),
        ):
            for value in values:
                if value < least:
                    raise InputError(f"--{name}: got {value}, accepted is {least} or more")
        longest = max(self.prompts, default=0)
        if self.loaded.max_positions is not None and longest > self.loaded.max_positions:
            limit = f"{self.loaded.max_positions:,} positions"
            raise InputError(f"--prompt: got {longest:,}, accepted is up to the model's {limit}")

    def protocol(self) -> dict:
        return {"prompt": self.prompts, "tokens": self.tokens, "batch": self.batches, **asdict(self.timing)}

    def pieces(self) -> list[Piece]:
        caches, timing = len(self.order), self.timing
        return [
            Piece(f"prompt {n:,} x {batch}", caches * n * batch * (1 + timing.rounds), ("prefill", n, batch), True)
            for n in self.prompts
            for batch in self.batches
        ] + [
            Piece(f"decoding at {n:,} x {batch}", caches * timing.tokens * batch, ("decode", n, batch), True)
            for n in self.tokens
            for batch in self.batches
        ]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        kind, tokens, batch = piece.of
        measured = {"prefill": prefilling, "decode": decoding}[kind]
        return measured(self.loaded, self.order, tokens=tokens, batch=batch, timing=self.timing, tick=tick)

    def results(self, records: dict[str, dict]) -> list[dict]:
        pieces = self.pieces()
        found = {
            kind: {spec: [records[p.key][spec] for p in pieces if p.of[0] == kind] for spec in self.order}
            for kind in ("prefill", "decode")
        }
        return [
            {
                "spec": spec,
                "prefill": [told["timing"] for told in found["prefill"][spec]],
                "decode": [told["timing"] for told in found["decode"][spec]],
                "memory": [*found["prefill"][spec], *found["decode"][spec]][-1]["memory"],
            }
            for spec in self.order
        ]

    def tables(self, result: dict) -> list[report.Table]:
        tables = []
        if self.prompts:
            tables.append(speeds.timing_table(result, "prefill", "Time to first token"))
        if self.tokens:
            tables.append(speeds.timing_table(result, "decode", "Time per output token"))
            tables.append(speeds.rate_table(result))
        return tables

    def notes(self, result: dict) -> list[str]:
        return ([PREFILL_NOTE] if self.prompts else []) + DECODE_NOTES

    def draw(self, result: dict, path: Path) -> None:
        speeds.draw(result, path)


def prefilling(
    loaded: Loaded, order: list[str], *, tokens: int, batch: int, timing: Timing, tick: Callable = lambda n: None
) -> dict[str, dict]:
    """Time to the first token of a prompt of `tokens` tokens in each of `batch` rows, through a fresh cache each time.

    Returns:
        by spec: `timing` as `summary` gives it, and `memory`, what the cache holds then.
    """
    model = loaded.model
    source = texts.read()
    ids = texts.windows(loaded.tokenizer, source, length=tokens, count=batch).ids.to(model.device)
    entrants, wanted = [Entrant(spec) for spec in order], None
    for turn in range(1 + timing.rounds):
        for entrant in in_turn(entrants, turn):
            with specs.routed(entrant.spec, model):
                cache = specs.build(entrant.spec, model, capacity=tokens)
                seconds, logits = first_token(model, ids, cache)
            tick(tokens * batch)
            if turn:
                entrant.seconds.append(seconds)
                continue
            # The first round is not clocked: it warms up, and its output is checked.
            entrant.memory = held.counted(cache, model, tokens * batch)
            log_probs = logits.float().log_softmax(dim=-1)
            wanted = log_probs if wanted is None else wanted
            judge(entrant, log_probs, wanted, exact_kl(model))
            del cache
    return told(entrants, tokens, batch, 1)


def decoding(
    loaded: Loaded, order: list[str], *, tokens: int, batch: int, timing: Timing, tick: Callable = lambda n: None
) -> dict[str, dict]:
    """Time of a decoded token with `tokens` tokens in each of `batch` rows of the cache.

    The caches are filled by hand with real keys and values, repeated to length, so that any length can be timed on any
    model: past the model's own positions the text means nothing, the work is the same.

    Returns:
        by spec: `timing` as `summary` gives it, and `memory`, what the cache holds after its first token.
    """
    model = loaded.model
    tile, token = real_states(loaded)
    tile = [tuple(state.repeat(batch, 1, 1, 1) for state in pair) for pair in tile]
    token = token.repeat(batch, 1)
    entrants = [Entrant(spec, filled(spec, model, tile, tokens, tokens + timing.tokens)) for spec in order]
    check(model, entrants, token)
    tick(len(entrants) * batch)
    for entrant in entrants:
        decode(model, entrant, token, timing.warmup)
        tick(timing.warmup * batch)
    for turn in range(timing.rounds):
        for entrant in in_turn(entrants, turn):
            entrant.seconds.append(decode(model, entrant, token, timing.steps))
            tick(timing.steps * batch)
    return told(entrants, tokens, batch, batch)


def in_turn(entrants: list[Entrant], turn: int) -> list[Entrant]:
    """Each round starts with another cache: what follows a large one finds the processor's caches cold."""
    first = turn % len(entrants)
    return entrants[first:] + entrants[:first]


def told(entrants: list[Entrant], tokens: int, batch: int, rate: int) -> dict[str, dict]:
    """What is recorded of each entrant, the first being the reference; `rate` tokens come out in its time."""
    return {
        entrant.spec: {"timing": summary(entrant, entrants[0], tokens, batch, rate), "memory": entrant.memory}
        for entrant in entrants
    }


@torch.no_grad()
def first_token(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> tuple[float, torch.Tensor]:
    """Seconds from the prompt `ids` `[batch, tokens]` to its first token, and that token's logits `[batch, vocab]`."""
    synchronize(ids.device)
    start = time.perf_counter()
    logits = forward(model, ids, cache, logits_to_keep=1).logits[:, -1]
    logits.argmax(dim=-1).tolist()  # a server has to look at the token before it can send it
    return time.perf_counter() - start, logits


@torch.no_grad()
def real_states(loaded: Loaded) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    """Keys and values of each layer for a short text, `[1, kv_heads, tokens, head_dim]`, and a token to go on with."""
    device = loaded.model.device
    ids = texts.windows(loaded.tokenizer, texts.read(), length=TILE + 1, count=1).ids.to(device)
    cache = specs.build(specs.REFERENCE, loaded.model, capacity=TILE)
    forward(loaded.model, ids[:, :TILE], cache, logits_to_keep=1)
    for index, layer in enumerate(cache.layers):
        if getattr(layer, "keys", None) is None:
            kind = type(layer).__name__
            raise InputError(f"--model: layer {index} of '{loaded.name}' ({kind}) has no keys to fill a cache with")
    return [(layer.keys, layer.values) for layer in cache.layers], ids[:, TILE:]


@torch.no_grad()
def filled(spec: str, model: PreTrainedModel, tile: list, tokens: int, capacity: int) -> Cache:
    """A cache that has seen `tokens` tokens: the `tile`, repeated, written with `update` layer by layer."""
    with specs.routed(spec, model):
        cache = specs.build(spec, model, capacity=capacity)
        for index, pair in enumerate(tile):
            repeats = -(-tokens // pair[0].shape[2])
            cache.update(*(state.repeat(1, 1, repeats, 1)[:, :, :tokens] for state in pair), index)
    return cache


@torch.no_grad()
def check(model: PreTrainedModel, entrants: list[Entrant], token: torch.Tensor) -> None:
    """Decodes one token `[batch, 1]` with each cache and compares it with the first one's.

    Where a cache holds as many bytes as the reference does, nothing was compressed or dropped, so that its output must
    be the reference's.
    """
    wanted = None
    for entrant in entrants:
        with specs.routed(entrant.spec, model):
            logits = forward(model, token, entrant.cache).logits[:, -1].float()
        # A static cache counts its tokens in a tensor.
        seen = int(entrant.cache.get_seq_length())
        entrant.memory = held.counted(entrant.cache, model, seen * len(token))
        log_probs = logits.log_softmax(dim=-1)
        wanted = log_probs if wanted is None else wanted
        contents = entrant.memory["held_bytes"] - spare(entrant.memory)
        complete = contents >= entrants[0].memory["held_bytes"]
        judge(entrant, log_probs, wanted, exact_kl(model) if complete else None)


def judge(entrant: Entrant, log_probs: torch.Tensor, wanted: torch.Tensor, limit: float | None) -> None:
    """Notes the KL of predictions `[batch, vocab]` from those that are wanted; a wrong output becomes the `fault`.

    Args:
        limit: the most that the output may differ by, where it must be the reference's; it must be finite in any case.
    """
    kl = torch.nn.functional.kl_div(log_probs, wanted, reduction="none", log_target=True).sum(-1).max().item()
    entrant.kl = max(kl, 0.0)
    if not torch.isfinite(log_probs).all():
        entrant.fault = "its output is not finite"
    elif limit is not None and kl > limit:
        entrant.fault = f"nothing is lost in it, yet its output differs (KL {kl:.3g} > {limit:g})"


def exact_kl(model: PreTrainedModel) -> float:
    """The most that rounding alone may move a prediction by, in nats."""
    return EXACT_KL.get(model.dtype, EXACT_KL_16_BITS)


def spare(memory: dict) -> int:
    """Bytes that a kvplug cache reserves and that hold nothing: a short one has more of them than contents."""
    return memory["report"]["spare"] if memory["report"] else 0


@torch.no_grad()
def decode(model: PreTrainedModel, entrant: Entrant, token: torch.Tensor, steps: int) -> float:
    """Seconds for one token, the median over `steps` forwards: one that another program held up doesn't count."""
    seconds = []
    with specs.routed(entrant.spec, model):
        synchronize(token.device)
        for _ in range(steps):
            start = time.perf_counter()
            forward(model, token, entrant.cache)
            # Generation waits for each token too, before it can feed it back.
            synchronize(token.device)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Waits for `device` to finish what it was given; on a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def summary(entrant: Entrant, reference: Entrant, tokens: int, batch: int, rate: int) -> dict:
    """One timing: milliseconds (median over rounds), tokens a second, the ratio to the reference with its spread."""
    ratios = [own / other for own, other in zip(entrant.seconds, reference.seconds, strict=True)]
    seconds = statistics.median(entrant.seconds)
    good = entrant.fault is None
    return {
        "tokens": tokens,
        "batch": batch,
        "ms": 1000 * seconds,
        "tokens_per_second": rate / seconds,
        "ratio": statistics.median(ratios) if good else None,
        "ratio_low": min(ratios) if good else None,
        "ratio_high": max(ratios) if good else None,
        "kl": entrant.kl,
        "held_bytes": entrant.memory["held_bytes"],
        "fault": entrant.fault,
    }


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    prompt: Annotated[
        list[int], typer.Option("--prompt", help="Tokens of a prompt whose first token is timed; repeatable, 0 skips.")
    ] = [512],  # noqa: B006 -- typer shows it as the default and never changes it
    tokens: Annotated[
        list[int], typer.Option("--tokens", help="Tokens in the cache when the clock starts; repeatable.")
    ] = [4096, 16384],  # noqa: B006
    batch: Annotated[list[int], typer.Option("--batch", help="Rows; repeatable.")] = [1],  # noqa: B006
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that each cache gets.")] = Timing.rounds,
    steps: Annotated[int, typer.Option("--steps", help="Tokens decoded per turn.")] = Timing.steps,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Times prompts and decoding with each cache against DynamicCache, in turn, at each length and batch."""
    timing = Timing(rounds=rounds, steps=steps)
    loaded = models.load(model, device=device, dtype=dtype)
    cache = specs.check(cache, loaded.model)
    prompts, lengths, batches = (list(dict.fromkeys(values)) for values in (prompt, tokens, batch))
    prompts = [n for n in prompts if n]
    work = Throughput(loaded, cache, seed, prompts=prompts, tokens=lengths, batches=batches, timing=timing)
    runner.run(work, out)


if __name__ == "__main__":
    console.run(main)
