"""What every eval's command line shares: its options, its one-line errors, its progress bars.

Must never measure anything: an eval works the same when it is called as a function, without a terminal.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from tqdm import tqdm

from evals.errors import InputError

ModelOption = Annotated[
    str, typer.Option("--model", help="`smollm2` (embedded), a local folder, or a name on the Hugging Face hub.")
]
CacheOption = Annotated[
    list[str],
    typer.Option(
        "--cache",
        help="A cache to measure; repeatable. A kvplug spec (`int4`, `streaming:sinks=4,window=508+int4`) or one of "
        "transformers' own (`transformers:static`, `transformers:fp8`, `transformers:hqq4`, …).",
    ),
]
DatasetOption = Annotated[
    str,
    typer.Option(
        "--dataset",
        help="`pydoc` (Python's own language reference), a local .txt, .jsonl, .json or .parquet file or a folder of "
        "them, or a hub name as NAME[:CONFIG[:SPLIT]].",
    ),
]
ColumnOption = Annotated[
    str | None, typer.Option("--column", help="The data set's text column, where it is not called `text`.")
]
DeviceOption = Annotated[
    str,
    typer.Option(
        "--device",
        help="Where the model runs: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto`, which spreads a model that is too large "
        "for one card over all of them (accelerate's device_map).",
    ),
]
DtypeOption = Annotated[
    str, typer.Option("--dtype", help="`auto` (as the model is stored), `float32`, `bfloat16` or `float16`.")
]
SeedOption = Annotated[int, typer.Option("--seed", help="What random numbers start from; recorded with the result.")]
WindowsOption = Annotated[int, typer.Option("--windows", min=1, help="Windows of text, spread over it.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Folder for the report and its picture.  [default: results/NAME]")
]


def run(command: Callable, arguments: list[str] | None = None) -> None:
    """Runs `command`, a function with typer options, as a program; an `InputError` is one line and exit code 2.

    Args:
        arguments: those of the command line by default.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(command)
    try:
        app(arguments)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def progress(total: int, description: str, unit: str, quiet: bool = False) -> tqdm:
    """A progress bar on stderr; where that is a file and not a terminal, a line every ten seconds at most."""
    return tqdm(
        total=total,
        desc=description,
        disable=quiet,
        unit=unit,
        dynamic_ncols=True,
        file=sys.stderr,
        mininterval=0.2 if sys.stderr.isatty() else 10.0,
    )


def say(line: str) -> None:
    """Prints a line on stdout."""
    print(line, flush=True)


def show(renderable) -> None:
    """Prints a rich table or text on stdout; a pipe gets room for all columns."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(renderable)
