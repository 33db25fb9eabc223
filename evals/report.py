"""One schema and one writer for the result of every eval: report.json, report.md, and the table on the terminal.

Must never hold a figure that the run didn't produce, nor anything that tells whose machine it was.
"""

import datetime
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import rich.box
import torch
import transformers
from rich.table import Table

import kvplug
from evals.models import Loaded

SCHEMA = 1
DECODE_NOTES = [
    "**decode** is the time of one decoded token as a ratio to DynamicCache's in the same run: all caches are taken in "
    "turn, round after round; the median of the rounds, with the smallest and the largest. Below 1 is faster. Caches "
    "are filled by hand with real keys and values to the length that is named.",
    "A cache whose first decoded token is wrong (not finite, or different although nothing was compressed or dropped) "
    "gets no ratio.",
]
QUALITY_NOTES = [
    "**KL** is KL(full cache ‖ this cache) in nats per token, **same top-1** the share of predictions with the same "
    "likeliest token. Both, and the perplexity, are taken over the tokens after the prompt, teacher-forced through the "
    "cache in small steps, so that every counted prediction reads back what was stored.",
    "**bits held** are all bytes that the cache object holds at the end (unique tensor storages reachable from it: "
    "scales, tables, full-precision residuals and spare capacity count), over all elements of K and V that a full "
    "cache has for the same tokens. A cache that drops tokens holds fewer bits for each element of the context.",
    "**bits stored** is what kvplug's `cache.memory()` tells for an element that is kept, scales included, spare "
    "capacity left out.",
]


@dataclass(frozen=True)
class Rows:
    """A table of text: a title, the heads of its columns, and rows of cells; the first column is left-aligned."""

    title: str
    heads: list[str]
    cells: list[list[str]]


def result(eval_name: str, loaded: Loaded, *, seed: int, protocol: dict, results: list[dict], **more) -> dict:
    """The result of an eval, as it is written to report.json."""
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    return {
        "schema": SCHEMA,
        "eval": eval_name,
        "command": shlex.join(["python", "-m", f"evals.{eval_name}", *sys.argv[1:]]),
        "model": {"name": loaded.name, "parameters": parameters, "dtype": str(loaded.model.dtype).split(".")[-1]},
        "protocol": protocol,
        **more,
        "seed": seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvplug": kvplug.__version__,
        },
        "machine": machine(loaded.model.device),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "results": results,
    }


def machine(device: torch.device) -> str:
    """What the run was timed on: processor, cores in use, and the accelerator where there is one."""
    name = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)}; {name}"
    elif device.type != "cpu":
        name = f"{device.type}; {name}"
    return name


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def tradeoff_table(result: dict) -> Rows:
    """Quality, memory and speed of each cache, in the order they were asked for."""
    heads = ["cache", "perplexity", "KL", "same top-1", "bits held", "bits stored", "bytes / token"]
    timed = any(entry.get("decode") for entry in result["results"])
    peaks = any(entry["memory"].get("peak_device_bytes") for entry in result["results"])
    heads += (["decode"] if timed else []) + (["peak MiB"] if peaks else [])
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
            f"{memory['bytes_per_token']:,.0f}",
        ]
        row += [decode_cell(entry.get("decode"))] if timed else []
        row += [f"{memory['peak_device_bytes'] / 2**20:,.0f}"] if peaks else []
        cells.append(row)
    return Rows("Quality against memory", heads, cells)


def decode_table(result: dict) -> Rows:
    """Decode time of each cache, a pair of columns for each length."""
    heads = ["cache"]
    for length in result["protocol"]["tokens"]:
        heads += [f"ms at {length:,}", f"ratio at {length:,}"]
    cells = []
    for entry in result["results"]:
        row = [entry["spec"]]
        for timing in entry["decode"]:
            row += [f"{timing['ms_per_token']:.1f}", decode_cell(timing)]
        cells.append(row)
    return Rows("Decode time per token", heads, cells)


def decode_cell(timing: dict | None) -> str:
    """A ratio with its spread, or the reason why there is none."""
    if not timing:
        return ""
    if timing["fault"]:
        return f"none: {timing['fault']}"
    return f"{timing['ratio']:.2f} ({timing['ratio_low']:.2f}–{timing['ratio_high']:.2f})"


def rich_table(rows: Rows) -> Table:
    """`rows` for the terminal."""
    table = Table(title=rows.title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, head in enumerate(rows.heads):
        # A narrow terminal folds a cell; a figure is never cut off.
        table.add_column(head, justify="right" if index else "left", overflow="fold")
    for row in rows.cells:
        table.add_row(*row)
    return table


def write(result: dict, rows: Rows, folder: Path, *, notes: list[str], picture: str | None = None) -> None:
    """Writes report.json and report.md to `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_finite(result), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "report.json").write_text(text + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(result, rows, notes, picture), encoding="utf-8")


def _finite(value):
    """`value` with null for what is no number: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(result: dict, rows: Rows, notes: list[str], picture: str | None) -> str:
    """The report for a reader: what was run, the table, how its figures were counted."""
    model, versions = result["model"], result["versions"]
    lines = [f"# {rows.title}", "", "```", result["command"], "```", ""]
    lines += [
        f"- model: {model['name']} ({model['parameters'] / 1e6:,.0f}M parameters, {model['dtype']})",
        "- protocol: " + ", ".join(f"{name} {value}" for name, value in result["protocol"].items()),
    ]
    if text := result.get("text"):
        lines.append(f"- text: {text['source']} ({text['tokens']:,} tokens, sha256 {text['sha256'][:12]})")
    lines += [
        f"- machine: {result['machine']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- date: {result['date']}, seed {result['seed']}",
        "",
    ]
    if picture:
        lines += [f"![{rows.title}]({picture})", ""]
    lines.append("| " + " | ".join(rows.heads) + " |")
    lines.append("| --- |" + " ---: |" * (len(rows.heads) - 1))
    lines += [
        "| " + " | ".join(f"`{cell}`" if i == 0 else cell for i, cell in enumerate(row)) + " |" for row in rows.cells
    ]
    lines += ["", *(f"- {note}" for note in notes), ""]
    return "\n".join(lines)
