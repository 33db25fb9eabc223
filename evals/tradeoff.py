"""Quality, memory and speed of every cache on one model: `python -m evals.tradeoff`, a table, a report and a picture.

Must never compare across runs: the full cache that all others are judged by is measured in the same run.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from evals import console, figure, models, report, specs, teacher, texts, throughput
from evals.errors import InputError
from evals.held import held_bytes
from evals.models import Loaded
from evals.teacher import Protocol, Scores

DEFAULT_CACHES = [
    "dense",
    "int8",
    "fp8",
    "int4",
    "window:window=512",
    "streaming:sinks=4,window=508",
    "streaming:sinks=4,window=508+int4",
    "transformers:fp8",
    "transformers:hqq4",
]


def measure(
    loaded: Loaded, caches: list[str], ids: torch.Tensor, protocol: Protocol, tick: Callable[[int], object]
) -> list[dict]:
    """Quality and memory of the reference and of each spec in `caches`, over all windows `ids` `[count, length]`.

    The reference's log probabilities are kept for one window at a time. `tick` is told the tokens that were fed.
    """
    order = list(dict.fromkeys([specs.REFERENCE, *caches]))
    scores: dict[str, list[Scores]] = {spec: [] for spec in order}
    memory: dict[str, dict] = {}
    for window in ids.to(loaded.model.device).split(1):
        against, full = None, 0
        for spec in order:
            with specs.routed(spec, loaded.model):
                before = start_peak(loaded.model.device)
                cache = specs.build(spec, loaded.model, capacity=protocol.length)
                if against is None:
                    against = teacher.reference(loaded.model, window, cache, protocol, tick)
                    full = sum(x.numel() for layer in cache.layers for x in keys_and_values(layer))
                    scores[spec].append(itself(against, window, protocol))
                else:
                    scores[spec].append(teacher.score(loaded.model, window, cache, protocol, against, tick))
                memory[spec] = count(cache, loaded, full, protocol.fed)
                memory[spec]["peak_device_bytes"] = peak_since(loaded.model.device, before)
                # Freed before the next is built: two caches at once would show in its peak.
                del cache
    return [{"spec": spec, "quality": Scores.join(scores[spec]).summary(), "memory": memory[spec]} for spec in order]


def itself(against: torch.Tensor, window: torch.Tensor, protocol: Protocol) -> Scores:
    """The reference judged by itself: its perplexity, no divergence, and full agreement."""
    parts = against.split(64)
    targets = window[0, protocol.prefill + 1 :].split(64)
    return Scores.join([teacher.compare(part, part, target) for part, target in zip(parts, targets, strict=True)])


def keys_and_values(layer) -> list[torch.Tensor]:
    """K and V that a layer of the reference holds; none where its state is of another kind."""
    return [x for x in (getattr(layer, "keys", None), getattr(layer, "values", None)) if x is not None]


def count(cache, loaded: Loaded, full: int, tokens: int) -> dict:
    """What `cache` holds after `tokens` tokens, where a full cache has `full` elements of K and V.

    Measured from outside for every cache; kvplug's own report stands beside it, and `report_agrees` compares the two.
    """
    held = held_bytes(cache, outside=loaded.model)
    own = cache.memory() if hasattr(cache, "memory") else None
    return {
        "held_bytes": held,
        "bytes_per_token": held / tokens,
        "bits_held": 8 * held / full,
        "bits_stored": own.bits_per_element if own else None,
        "drops_tokens": bool(own and own.tokens_kept < own.tokens_seen),
        "tokens_seen": tokens,
        "report": asdict(own) if own else None,
        "report_agrees": own.total == held if own else None,
    }


def start_peak(device: torch.device) -> int:
    """Starts to watch the device's memory; returns what is allocated now."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def peak_since(device: torch.device, before: int) -> int | None:
    """The most bytes that were allocated on the device at once, above `before`; None where no allocator counts."""
    return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    prefill: Annotated[int, typer.Option("--prefill", help="Tokens of prompt, fed at once.")] = Protocol.prefill,
    step: Annotated[int, typer.Option("--step", help="Tokens fed at a time after it.")] = Protocol.step,
    length: Annotated[int, typer.Option("--length", help="Tokens in a window.")] = Protocol.length,
    windows: Annotated[int, typer.Option("--windows", min=1, help="Windows, spread over the text.")] = 1,
    decode_tokens: Annotated[
        int, typer.Option("--decode-tokens", min=0, help="Tokens in the cache while decoding is timed; 0 skips it.")
    ] = 4096,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: Annotated[Path, typer.Option("--out", help="Folder for report.md, report.json and tradeoff.png.")] = Path(
        "results/tradeoff"
    ),
) -> None:
    """Measures what each cache costs in quality and saves in memory, and how fast it decodes, against DynamicCache."""
    protocol = Protocol(prefill=prefill, step=step, length=length)
    text = texts.read(dataset, column=column)
    torch.manual_seed(seed)
    loaded = models.load(model, device=device, dtype=dtype)
    if loaded.max_positions is not None and length > loaded.max_positions:
        raise InputError(f"--length: got {length:,}, accepted is up to the model's {loaded.max_positions:,} positions")
    cache = specs.check(cache, loaded.model)
    cut = texts.windows(loaded.tokenizer, text, length=length, count=windows)

    order = list(dict.fromkeys([specs.REFERENCE, *cache]))
    with console.progress(len(order) * windows * protocol.fed, "Reading back", "token") as bar:
        results = measure(loaded, cache, cut.ids, protocol, bar.update)
    if decode_tokens:
        timing = replace(throughput.Timing(), rounds=5, steps=4)
        with console.progress(throughput.turns(cache, timing), "Decoding", "turn") as bar:
            timed = throughput.measure(loaded, cache, tokens=decode_tokens, timing=timing, tick=bar.update)
        for entry in results:
            entry["decode"] = timed[entry["spec"]]

    result = report.result(
        "tradeoff",
        loaded,
        seed=seed,
        protocol={**asdict(protocol), "windows": windows, "decode_tokens": decode_tokens},
        text={"source": text.source, "sha256": text.sha256, "tokens": cut.total, "starts": list(cut.starts)},
        results=results,
    )
    rows = report.tradeoff_table(result)
    notes = report.QUALITY_NOTES + (report.DECODE_NOTES if decode_tokens else [])
    report.write(result, rows, out, notes=notes, picture="tradeoff.png")
    figure.tradeoff(result, out / "tradeoff.png")
    console.show(report.rich_table(rows))
    for entry in results:
        if entry["memory"]["report_agrees"] is False:
            told, held = entry["memory"]["report"]["total"], entry["memory"]["held_bytes"]
            print(f"warning: {entry['spec']} reports {told:,} bytes and holds {held:,}")
    print(f"Written to {out}: report.md, report.json, tradeoff.png")


if __name__ == "__main__":
    console.run(main)
