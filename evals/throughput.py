"""Decode time per token against DynamicCache: `python -m evals.throughput`.

All caches are taken in turn, round after round, since a machine drifts by more than the differences between them. Must
never print a ratio for a cache whose output is wrong.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import Cache, PreTrainedModel

from evals import console, models, report, specs, texts
from evals.errors import InputError
from evals.held import held_bytes
from evals.models import Loaded, forward

DEFAULT_CACHES = ["dense", "int8", "int4", "transformers:static", "transformers:fp8", "transformers:hqq4"]
# A prompt this long gives the real keys and values that are repeated to fill a cache of any length.
TILE = 256
# What full precision may differ by in KL: sums are rounded in another order, which shows more in 16 bits.
EXACT_KL = {torch.float32: 1e-4}
EXACT_KL_16_BITS = 1e-2


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
class Runner:
    """One filled cache on its way through the rounds; `seconds` has one entry per round, per token."""

    spec: str
    cache: Cache
    kl: float = 0.0
    fault: str | None = None
    bytes: int = 0
    seconds: list[float] = field(default_factory=list)


def measure(
    loaded: Loaded, caches: list[str], *, tokens: int, timing: Timing, tick: Callable[[int], object] = lambda n: None
) -> dict[str, dict]:
    """Decode time of each spec in `caches`, and of the reference, with `tokens` tokens in the cache.

    The caches are filled by hand with real keys and values, repeated to length, so that any length can be timed on any
    model: past the model's own positions the text means nothing, the work is the same. `tick` is told of each turn.

    Returns:
        by spec: `ms_per_token` (median over rounds), `ratio` to the reference and its `ratio_low` and `ratio_high`
        (smallest and largest round), `kl` of its first token against the reference's, `held_bytes`, `tokens`; `fault`
        says why there is no ratio.
    """
    if tokens < 1:
        raise InputError(f"--tokens: got {tokens}, accepted is 1 or more")
    model = loaded.model
    order = list(dict.fromkeys([specs.REFERENCE, *caches]))
    tile, token = real_states(loaded)
    runners = [Runner(spec, filled(spec, model, tile, tokens, tokens + timing.tokens)) for spec in order]
    check(model, runners, token)
    tick(len(runners))
    for runner in runners:
        decode(model, runner, token, timing.warmup)
        tick(1)
    for turn in range(timing.rounds):
        # Each round starts with another cache: what follows a large one finds the processor's caches cold.
        for runner in runners[turn % len(runners) :] + runners[: turn % len(runners)]:
            runner.seconds.append(decode(model, runner, token, timing.steps))
            tick(1)
    return {runner.spec: summary(runner, runners[0], tokens) for runner in runners}


def turns(caches: list[str], timing: Timing) -> int:
    """How often `measure` calls `tick` in all, counted in turns of one cache."""
    return len(dict.fromkeys([specs.REFERENCE, *caches])) * (2 + timing.rounds)


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
def check(model: PreTrainedModel, runners: list[Runner], token: torch.Tensor) -> None:
    """Decodes one token with each cache and compares it with the first one's; a wrong output becomes its `fault`.

    Output must be finite; and where a cache holds as many bytes as the reference does, nothing was compressed or
    dropped, so that its output must be the reference's.
    """
    wanted, limit = None, EXACT_KL.get(model.dtype, EXACT_KL_16_BITS)
    for runner in runners:
        with specs.routed(runner.spec, model):
            logits = forward(model, token, runner.cache).logits[0, -1].float()
        runner.bytes = held_bytes(runner.cache, outside=model)
        log_probs = logits.log_softmax(dim=-1)
        wanted = log_probs if wanted is None else wanted
        kl = torch.nn.functional.kl_div(log_probs, wanted, reduction="sum", log_target=True).item()
        runner.kl = max(kl, 0.0)
        if not torch.isfinite(logits).all():
            runner.fault = "its output is not finite"
        elif runner.bytes - spare(runner.cache) >= runners[0].bytes and kl > limit:
            runner.fault = f"it holds everything, yet its output differs (KL {kl:.3g} > {limit:g})"


def spare(cache: Cache) -> int:
    """Bytes that a kvplug cache reserves and that hold nothing: a short one has more of them than contents."""
    return cache.memory().spare if hasattr(cache, "memory") else 0


@torch.no_grad()
def decode(model: PreTrainedModel, runner: Runner, token: torch.Tensor, steps: int) -> float:
    """Seconds for one token, the median over `steps` forwards: one that another program held up doesn't count."""
    seconds = []
    with specs.routed(runner.spec, model):
        synchronize(token.device)
        for _ in range(steps):
            start = time.perf_counter()
            forward(model, token, runner.cache)
            # Generation waits for each token too, before it can feed it back.
            synchronize(token.device)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def synchronize(device: torch.device) -> None:
    """Waits for `device` to finish what it was given; on a CPU there is nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def summary(runner: Runner, reference: Runner, tokens: int) -> dict:
    """What `measure` returns for one cache."""
    ratios = [own / other for own, other in zip(runner.seconds, reference.seconds, strict=True)]
    good = runner.fault is None
    return {
        "tokens": tokens,
        "ms_per_token": 1000 * statistics.median(runner.seconds),
        "ratio": statistics.median(ratios) if good else None,
        "ratio_low": min(ratios) if good else None,
        "ratio_high": max(ratios) if good else None,
        "kl": runner.kl,
        "held_bytes": runner.bytes,
        "fault": runner.fault,
    }


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    tokens: Annotated[
        list[int], typer.Option("--tokens", help="Tokens in the cache when the clock starts; repeatable.")
    ] = [4096, 16384],  # noqa: B006 -- typer shows it as the default and never changes it
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that each cache gets.")] = Timing.rounds,
    steps: Annotated[int, typer.Option("--steps", help="Tokens decoded per turn.")] = Timing.steps,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md and report.json.")] = Path(
        "results/throughput"
    ),
) -> None:
    """Times decoding with each cache against DynamicCache, in turn, at each length."""
    timing = Timing(rounds=rounds, steps=steps)
    torch.manual_seed(seed)
    loaded = models.load(model, device=device, dtype=dtype)
    cache = specs.check(cache, loaded.model)
    lengths = list(dict.fromkeys(tokens))
    found: dict[int, dict[str, dict]] = {}
    with console.progress(len(lengths) * turns(cache, timing), "Decoding", "turn") as bar:
        for length in lengths:
            found[length] = measure(loaded, cache, tokens=length, timing=timing, tick=bar.update)
    result = report.result(
        "throughput",
        loaded,
        seed=seed,
        protocol={"tokens": lengths, "rounds": rounds, "steps": steps, "batch": 1},
        results=[{"spec": spec, "decode": [found[length][spec] for length in lengths]} for spec in found[lengths[0]]],
    )
    rows = report.decode_table(result)
    report.write(result, rows, out, notes=report.DECODE_NOTES)
    console.show(report.rich_table(rows))
    print(f"Written to {out}/report.md and report.json")


if __name__ == "__main__":
    console.run(main)
