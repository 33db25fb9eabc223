"""The command `kvplug`: what a cache will cost, before a machine is rented for it.

Must never count bytes of its own: every figure comes from the planner. What a user can mend ends in one line and exit
code 2; anything else is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
import math
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub.errors import StrictDataclassError
from rich.console import Console
from rich.table import Table
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    AutoConfig,
    PreTrainedConfig,
)

from kvplug import compat
from kvplug.memory import MemoryReport, human
from kvplug.planning import Planner
from kvplug.shapes import SHAPES, shape
from kvplug.spec import one_of_each

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)
# Typer ships with a click of its own in newer versions; what it raises for a bad option is found by its name.
USAGE_ERROR = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
UNITS = {f"{prefix}{end}": base**power for end, base in (("iB", 1024), ("B", 1000))
         for power, prefix in enumerate("KMGT", start=1)}  # fmt: skip
GENERATING = (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
)
MOST_MEMORY = 1024 * UNITS["TiB"]


class InputError(Exception):
    """What was asked for can't be done; the message names the argument, its value and what is accepted."""


@dataclass(frozen=True)
class Model:
    """The model that is planned for: `max_tokens` is the longest context it was made for, None where it is not told."""

    name: str
    config: PreTrainedConfig
    dtype: torch.dtype
    max_tokens: int | None


@dataclass(frozen=True)
class Row:
    """One cache: the report of each length, how many tokens fit the memory, and how many requests of each length do.

    `fits` is None where any number of tokens does, and where no memory was given.
    """

    spec: str
    planner: Planner
    reports: dict[int, MemoryReport]
    fits: int | None
    requests: dict[int, int]


@app.callback()
def commands() -> None:
    """KV caches for transformers."""


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A config.json or a folder with one, a built-in shape, or a name on the Hugging Face hub. "
            f"Built in: {', '.join(SHAPES)}.",
        ),
    ],
    cache: Annotated[
        list[str] | None,
        typer.Option("--cache", metavar="SPEC", help="A cache, such as `int4` or `window:window=512+int8`; repeatable. "
                     "By default one of each kind."),
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option("--tokens", metavar="N", min=1, max=10**9, help="Length of a request, prompt and answer together; "
                     "repeatable. By default 8192 and the model's longest context."),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", metavar="N", min=1, max=4096, help="Requests of equal length in one cache.")
    ] = 1,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="What is left for the cache once weights, activations and all "
                     "else have their place: 80GiB, 24GB. KiB, MiB, GiB, TiB count in 1024s, KB, MB, GB, TB in 1000s."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help=f"The model's: {', '.join(DTYPES)}. By default what its config names, or else "
                     "bfloat16."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw bytes against context length.")
    ] = None,
) -> None:  # fmt: skip
    """Exact bytes of each cache for a model, and what fits a memory. No weights are loaded and nothing is allocated."""
    limit = read_memory(memory)
    memory = " ".join(memory.split()) if memory is not None else ""
    if plot is not None:
        check_plot(plot)
    asked = read_model(model, dtype)
    lengths = sorted(set(tokens or default_lengths(asked.max_tokens)))
    rows, refused = plan_all(asked, cache, lengths, batch, limit)
    if as_json:
        print(json.dumps(as_data(asked, rows, refused, batch, limit), indent=2, ensure_ascii=False))
    else:
        show(asked, rows, refused, batch, memory)
    if plot is not None:
        from kvplug.plotting import draw

        draw(
            [(row.spec, row.planner, row.fits) for row in rows],
            plot,
            title(asked, batch),
            lengths,
            batch,
            limit,
            memory,
        )


def read_memory(text: str | None) -> int | None:
    """Bytes of a size such as "80GiB" or "1.5 TB"."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?b)", text.strip(), re.IGNORECASE)
    units = {name.lower(): size for name, size in UNITS.items()}
    size = math.floor(float(match[1]) * units[match[2].lower()]) if match else 0
    if not 0 < size <= MOST_MEMORY:
        raise InputError(
            f"--memory={text!r} is not valid; a number above 0 and one of {', '.join(UNITS)} is accepted, such as "
            "80GiB, up to 1024TiB"
        )
    return size


def check_plot(path: Path) -> None:
    if path.suffix.lower() != ".png":
        raise InputError(f"--plot={str(path)!r} is not valid; a file that ends in .png is accepted")
    if not path.parent.is_dir():
        raise InputError(f"--plot={str(path)!r} is not valid; its folder {str(path.parent)!r} does not exist")
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"--plot={str(path)!r} needs matplotlib, which is not installed: pip install matplotlib")


def read_model(name: str, dtype: str | None) -> Model:
    """The model of that name, from a file or folder, the built-in shapes, or the hub."""
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype={dtype!r} is not valid; use one of {', '.join(DTYPES)}")
    config = read_config(name)
    text = compat.text_config(config)
    if not any(type(part) in models for part in (config, text) for models in GENERATING):
        raise InputError(
            f"MODEL={name!r} is of type {config.model_type!r}, which generates no text and so needs no cache; a "
            "model with a text decoder is accepted"
        )
    named = getattr(text, "dtype", None) or getattr(config, "dtype", None) or torch.bfloat16
    longest = getattr(text, "max_position_embeddings", None)
    return Model(name, config, DTYPES.get(dtype, named), longest if isinstance(longest, int) and longest > 0 else None)


def read_config(name: str) -> PreTrainedConfig:
    local = Path(name).expanduser().exists()
    if not local and name.lower() in SHAPES:
        return shape(name.lower())
    accepted = (
        "a config.json, a folder with one, a name on the Hugging Face hub or a built-in shape is accepted; built in: "
        + ", ".join(SHAPES)
    )
    near = [] if local or "/" in name else difflib.get_close_matches(name.lower(), SHAPES, n=1, cutoff=0.75)
    if near:
        raise InputError(f"MODEL={name!r} is not known; did you mean {near[0]!r}? Otherwise {accepted}")
    # Without a network the hub's client tells of each retry; the last word is said below.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        return AutoConfig.from_pretrained(str(Path(name).expanduser()) if local else name, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        if local:
            raise InputError(f"MODEL={name!r} can't be read as a config ({first_line(error)}); {accepted}") from error
        reason = "it is not a local file, and the hub did not give it"
        raise InputError(f"MODEL={name!r} is not known: {reason} ({first_line(error)}); {accepted}") from error


def first_line(error: BaseException) -> str:
    """The first line that says something; libraries add paragraphs of advice to theirs."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return (" ".join(lines[:2]) if lines[0].endswith(":") else lines[0]).rstrip(".")


def default_lengths(longest: int | None) -> list[int]:
    return [8192] if longest is None else [min(8192, longest), longest]


def plan_all(
    model: Model, specs: list[str] | None, lengths: list[int], batch: int, limit: int | None
) -> tuple[list[Row], dict[str, str]]:
    """A row for each spec; where the specs are ours, those that the model can't be used with are told apart."""
    rows: list[Row] = []
    refused: dict[str, str] = {}
    for spec in dict.fromkeys(specs or one_of_each()):
        try:
            planner = Planner(model.config, spec, model.dtype)
        except ValueError as error:
            if specs or spec == "dense":
                raise InputError(first_line(error)) from error
            refused[spec] = first_line(error)
            continue
        reports = {length: planner.report(length, batch) for length in lengths}
        fits, requests = None, {}
        if limit is not None:
            fits = planner.fits(limit, batch)
            requests = {length: limit // report.total * batch for length, report in reports.items()}
        rows.append(Row(spec, planner, reports, fits, requests))
    return rows, refused


def as_data(model: Model, rows: list[Row], refused: dict[str, str], batch: int, limit: int | None) -> dict:
    """What `--json` prints: bytes are whole numbers, and `unlimited` says that any number of tokens fits."""
    caches = []
    for row in rows:
        lengths = []
        for length, report in row.reports.items():
            entry = {"tokens": length, "bytes": report.total, "requests_that_fit": row.requests.get(length)}
            lengths.append({**entry, "report": asdict(report)})
        entry = {
            "spec": row.spec,
            "bytes_per_token": row.planner.bytes_per_token,
            "fixed_bytes": row.planner.fixed(batch),
            "tokens_kept": row.planner.budget,
            "share_kept": row.planner.share,
            "lengths": lengths,
        }
        if limit is not None:
            entry |= {"tokens_that_fit": row.fits, "unlimited": row.fits is None}
        caches.append(entry)
    return {
        "model": model.name,
        "model_type": model.config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_tokens": model.max_tokens,
        "layers": rows[0].planner.layers,
        "batch": batch,
        "memory_bytes": limit,
        "caches": caches,
        "refused": [{"spec": spec, "reason": reason} for spec, reason in refused.items()],
    }


def title(model: Model, batch: int) -> str:
    rows = f", {batch:,} requests in a cache" if batch > 1 else ""
    return f"{Path(model.name).name if Path(model.name).exists() else model.name}, {dtype_of(model)}{rows}"


def dtype_of(model: Model) -> str:
    return str(model.dtype).removeprefix("torch.")


def show(model: Model, rows: list[Row], refused: dict[str, str], batch: int, memory: str) -> None:
    """Prints the table; a pipe gets room for all columns. `memory` is the size as it was given, or empty."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    layers = ", ".join(f"{count} {kind}" for kind, count in rows[0].planner.layers.items())
    made_for = f"; made for up to {model.max_tokens:,} tokens" if model.max_tokens else ""
    console.print(f"{title(model, batch)}: layers of attention: {layers}{made_for}", markup=False, soft_wrap=True)
    fixed = any(row.planner.fixed(batch) for row in rows)
    lengths = list(rows[0].reports)

    headers = ["bytes\na token", "tokens\nkept", *(["fixed"] if fixed else [])]
    each = "a request of" if batch == 1 else f"{batch:,} requests of"
    headers += [f"{each}\n{length:,} tokens" for length in lengths]
    if memory:
        headers.append(f"tokens that\nfit {memory}")
        headers += [f"requests of\n{length:,} that fit" for length in lengths]
    table = Table(header_style="bold", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("cache", no_wrap=True, vertical="bottom")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        budget, share = row.planner.budget, row.planner.share
        kept = f"{share:.0%}" if share is not None else "all" if budget is None else f"{budget:,}"
        cells = [f"{row.planner.bytes_per_token:,}", kept, *([human(row.planner.fixed(batch))] if fixed else [])]
        cells += [human(report.total) for report in row.reports.values()]
        if memory:
            cells.append("unlimited" if row.fits is None else f"{row.fits:,}")
            cells += [f"{row.requests[length]:,}" for length in lengths]
        table.add_row(row.spec, *cells)
    console.print()
    console.print(table)
    console.print()
    for note in notes(model, rows, refused, fixed):
        console.print(note, markup=False, soft_wrap=True)


def notes(model: Model, rows: list[Row], refused: dict[str, str], fixed: bool) -> list[str]:
    """What a reader must know to take the figures for what they are."""
    said = ["Requests include spare capacity, bytes a token do not. Weights and activations come on top."]
    if fixed:
        said.append("Fixed: sliding windows once they are full, and the states of linear attention; in every request.")
    beyond = [length for length in rows[0].reports if model.max_tokens and length > model.max_tokens]
    if beyond:
        said.append(f"{', '.join(f'{x:,}' for x in beyond)} tokens are more than the model was made for.")
    return said + [f"Left out: {spec}: {reason}." for spec, reason in refused.items()]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command with `arguments`, those of the command line by default."""
    try:
        code = app(arguments, standalone_mode=False, prog_name="kvplug")
    except InputError as error:
        message = str(error)
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split())
    else:
        sys.exit(code if isinstance(code, int) else 0)
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)
