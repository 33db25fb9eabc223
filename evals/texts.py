"""The text an eval reads: Python's own language reference, local files, or a data set from the hub.

Must never read more than it needs (everything is streamed) and never draw at random: the same source gives the same
windows every time.
"""

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import load_dataset
from datasets.exceptions import DatasetNotFoundError
from transformers import PreTrainedTokenizerBase

from evals.errors import InputError, first_line

EMBEDDED = "pydoc"
# Enough for hundreds of windows, and small enough that a data set of any size starts at once.
MAX_CHARACTERS = 4_000_000
BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
ACCEPTED = f"'{EMBEDDED}', a {', '.join(BUILDERS)} file, a folder of them, or a hub name as NAME[:CONFIG[:SPLIT]]"


@dataclass(frozen=True)
class Text:
    """A text and where it came from; `sha256` tells two versions of one source apart."""

    source: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


@dataclass(frozen=True)
class Windows:
    """`ids` is `[count, length]`; `starts` are the windows' first tokens in the text of `total` tokens."""

    ids: torch.Tensor
    starts: tuple[int, ...]
    total: int


def read(source: str = EMBEDDED, *, column: str | None = None) -> Text:
    """Reads the first four million characters of `source`; documents are joined by an empty line.

    Args:
        source: `"pydoc"`, which every Python carries (its words depend on the Python version, which is recorded);
            a local file or folder of one format; or a hub name, `NAME[:CONFIG[:SPLIT]]`, the split being `train`
            where none is given.
        column: the column that holds the text; by default `text`, or the only column of strings.

    Raises:
        InputError: the source can't be found or holds no text.
    """
    if source == EMBEDDED:
        return Text(f"pydoc_data.topics of Python {platform.python_version()}", _pydoc())
    path = Path(source)
    if not path.exists() and path.suffix in BUILDERS:
        raise InputError(f"--dataset: there is no file '{source}' (accepted are {ACCEPTED})")
    try:
        rows = _local(path) if path.exists() else _hub(source)
        content = _join(_strings(rows, source, column))
    except (OSError, ValueError, DatasetNotFoundError) as error:
        raise InputError(f"--dataset: can't read '{source}': {first_line(error)} (accepted are {ACCEPTED})") from error
    if not content.strip():
        raise InputError(f"--dataset: '{source}' holds no text")
    return Text(source, content)


def windows(tokenizer: PreTrainedTokenizerBase, text: Text, *, length: int, count: int) -> Windows:
    """Cuts `count` windows of `length` tokens out of `text`, each in the middle of one of `count` equal parts.

    Where the model's tokenizer opens a text with a token of its own, each window opens with that token.

    Raises:
        InputError: the text is shorter than `count` windows.
    """
    ids = torch.tensor(tokenizer(text.content, add_special_tokens=False, verbose=False).input_ids)
    total = len(ids)
    if total < count * length:
        raise InputError(
            f"--dataset: '{text.source}' has {total:,} tokens, too short for {count} windows of {length:,}; "
            f"ask for fewer or shorter ones, or give a longer text"
        )
    starts = tuple((total * (2 * i + 1) // count - length) // 2 for i in range(count))
    cut = torch.stack([ids[start : start + length] for start in starts])
    opening = tokenizer("a").input_ids[:1]
    if opening and opening[0] == tokenizer.bos_token_id:
        cut[:, 0] = opening[0]
    return Windows(cut, starts, total)


def told(text: Text, cut: Windows) -> dict:
    """What a report says of a text and of the windows that were cut from it."""
    return {"source": text.source, "sha256": text.sha256, "tokens": cut.total, "starts": list(cut.starts)}


def _pydoc() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _local(path: Path):
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in BUILDERS)
        kinds = {BUILDERS[file.suffix] for file in files}
        if len(kinds) != 1:
            found = " and ".join(sorted(kinds)) or "none"
            raise ValueError(f"a folder must hold files of one format; found {found}")
    else:
        files, kinds = [path], {BUILDERS.get(path.suffix)}
        if None in kinds:
            raise ValueError(f"unknown ending '{path.suffix}'")
    if not any(file.stat().st_size for file in files):
        raise InputError(f"--dataset: '{path}' holds no text")
    builder = kinds.pop()
    # A text file is one document: line by line, its paragraphs would be lost.
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=[str(file) for file in files], split="train", streaming=True, **options)


def _hub(source: str):
    name, config, split = [*source.split(":"), "", ""][:3]
    return load_dataset(name, config or None, split=split or "train", streaming=True)


def _strings(rows, source: str, column: str | None) -> Iterator[str]:
    for row in rows:
        if column is None:
            column = _text_column(row, source)
        if column not in row:
            raise InputError(f"--column: '{source}' has no column '{column}'; it has {', '.join(row)}")
        if not isinstance(row[column], str):
            raise InputError(f"--column: '{column}' of '{source}' holds {type(row[column]).__name__}, not text")
        yield row[column]


def _text_column(row: dict, source: str) -> str:
    strings = [name for name, value in row.items() if isinstance(value, str)]
    if "text" in strings:
        return "text"
    if len(strings) != 1:
        raise InputError(f"--column: say which column of '{source}' is the text; it has {', '.join(row)}")
    return strings[0]


def _join(documents: Iterator[str]) -> str:
    kept, characters = [], 0
    for document in documents:
        kept.append(document)
        characters += len(document)
        if characters >= MAX_CHARACTERS:
            break
    return "\n\n".join(kept)[:MAX_CHARACTERS]
