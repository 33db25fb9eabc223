"""One schema and one writer for the result of every eval: report.json, report.md, report.html, the terminal's table.

Must never hold a figure that the run didn't produce, nor anything that tells whose machine it was.
"""

from __future__ import annotations

import base64
import datetime
import html
import json
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import rich.box
import rich.table
import torch
import transformers
from markdown_it import MarkdownIt

import kvplug
from evals import console

if TYPE_CHECKING:
    from evals.runner import Eval

SCHEMA = 2
FILES = ("report.md", "report.html", "report.json")
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
body {{ color: #222; background: #fff; }}
h1, h2 {{ line-height: 1.2; }}
img {{ max-width: 100%; height: auto; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 1rem 0; }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #ddd; white-space: nowrap; }}
thead th {{ border-bottom: 2px solid #999; }}
pre {{ background: #f4f4f4; padding: .8rem; white-space: pre-wrap; }}
code {{ font: .9em ui-monospace, monospace; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


@dataclass(frozen=True)
class Table:
    """A table of text: a title, the heads of its columns, and rows of cells; the first column is left-aligned."""

    title: str
    heads: list[str]
    cells: list[list[str]]


def result(work: Eval, results: list[dict]) -> dict:
    """The result of an eval, as it is written to report.json: one entry for each cache in `results`."""
    model = work.loaded.model
    return {
        "schema": SCHEMA,
        "eval": work.name,
        "command": shlex.join(["python", "-m", f"evals.{work.name}", *sys.argv[1:]]),
        "model": {
            "name": work.loaded.name,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "dtype": str(model.dtype).split(".")[-1],
        },
        "protocol": work.protocol(),
        "text": work.text,
        "seed": work.seed,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "kvplug": kvplug.__version__,
        },
        "machine": machine(model.device),
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


def rich_table(table: Table) -> rich.table.Table:
    """`table` for the terminal."""
    shown = rich.table.Table(title=table.title, box=rich.box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, head in enumerate(table.heads):
        # A narrow terminal folds a cell; a figure is never cut off.
        shown.add_column(head, justify="right" if index else "left", overflow="fold")
    for row in table.cells:
        shown.add_row(*row)
    return shown


def show(work: Eval, result: dict, folder: Path) -> None:
    """Tells of a finished run on the terminal: its tables, what is wrong with a cache's own count, where it lies."""
    for table in work.tables(result):
        console.show(rich_table(table))
    for entry in result["results"]:
        memory = entry.get("memory") or {}
        if memory.get("report_agrees") is False:
            told, held = memory["report"]["total"], memory["held_bytes"]
            console.say(f"warning: {entry['spec']} reports {told:,} bytes and holds {held:,}")
    console.say(f"Written to {folder}: {', '.join(FILES)}, {work.name}.png")


def write(work: Eval, result: dict, folder: Path) -> None:
    """Writes the report and its picture to `folder`, which is made where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{work.name}.png"
    work.draw(result, picture)
    tables, notes = work.tables(result), work.notes(result)
    told = json.dumps(finite(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    embedded = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    written = {
        "report.md": markdown(work.title, result, tables, notes, picture.name),
        "report.html": page(work.title, markdown(work.title, result, tables, notes, embedded)),
        "report.json": told,
    }
    for name in FILES:
        (folder / name).write_text(written[name], encoding="utf-8")


def finite(value):
    """`value` with null for what is no number: JSON has no other word for it."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def markdown(title: str, result: dict, tables: list[Table], notes: list[str], picture: str) -> str:
    """The report for a reader: what was run, the picture, the tables, how their figures were counted."""
    model, versions = result["model"], result["versions"]
    lines = [f"# {title}", "", "```", result["command"], "```", ""]
    lines += [
        f"- model: {model['name']} ({model['parameters'] / 1e6:,.0f}M parameters, {model['dtype']})",
        "- protocol: " + ", ".join(f"{name} {value}" for name, value in result["protocol"].items()),
    ]
    if text := result["text"]:
        lines.append(f"- text: {text['source']} ({text['tokens']:,} tokens, sha256 {text['sha256'][:12]})")
    lines += [
        f"- machine: {result['machine']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in versions.items())}",
        f"- date: {result['date']}, seed {result['seed']}",
        "",
        f"![{title}]({picture})",
        "",
    ]
    for table in tables:
        lines += [f"## {table.title}", ""] if len(tables) > 1 else []
        lines.append("| " + " | ".join(table.heads) + " |")
        lines.append("| --- |" + " ---: |" * (len(table.heads) - 1))
        lines += ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for row in table.cells]
        lines.append("")
    lines += [*(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


def page(title: str, text: str) -> str:
    """The same report as one HTML page that needs no other file."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    return PAGE.format(title=html.escape(title), body=body)
