"""Runs any eval: piece by piece, shared out over processes, taken up again where it was stopped, written down once.

Must never let a number depend on how the pieces were shared out, or on whether the run was stopped in between: every
piece starts from the same seed and leaves nothing behind for the next.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object

import kvplug
from evals import console, report, specs
from evals.models import Loaded, processes
from evals.report import Table


@dataclass(frozen=True)
class Piece:
    """What is measured in one go, and lost in one go where a run is stopped.

    Attributes:
        key: names it, uniquely within the run.
        size: how many ticks the progress bar gets while it is measured.
        of: what the eval's `measure` needs to know.
        timed: whether it reads the clock; such a piece runs while all other processes wait.
    """

    key: str
    size: int
    of: tuple = ()
    timed: bool = False


@dataclass
class Eval:
    """One eval: its pieces, how each is measured, and how the figures are put on paper.

    Attributes:
        loaded: the model.
        caches: specs to measure; the reference is measured beside them.
        seed: what each piece's random numbers start from.
        text: where the text came from, for the report.
    """

    loaded: Loaded
    caches: list[str]
    seed: int = 0
    text: dict | None = None

    name: ClassVar[str]
    title: ClassVar[str]
    unit: ClassVar[str] = "token"

    @property
    def order(self) -> list[str]:
        """All specs that are measured, the reference first."""
        return list(dict.fromkeys([specs.REFERENCE, *self.caches]))

    def protocol(self) -> dict:
        """What was asked for, apart from model, caches and text; a figure depends on nothing else."""
        raise NotImplementedError

    def pieces(self) -> list[Piece]:
        """All pieces, those that share work next to each other."""
        raise NotImplementedError

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """Measures one piece; what it returns must survive a trip through JSON."""
        raise NotImplementedError

    def results(self, records: dict[str, dict]) -> list[dict]:
        """From what `measure` returned, by the pieces' keys, to one entry for each spec.

        An entry holds `spec`, `memory` (as `held.counted` gives it) and whatever the eval measures.
        """
        raise NotImplementedError

    def tables(self, result: dict) -> list[Table]:
        """The tables of the report."""
        raise NotImplementedError

    def notes(self, result: dict) -> list[str]:
        """How the figures were counted, in Markdown, a sentence or two each."""
        return []

    def draw(self, result: dict, path: Path) -> None:
        """Draws the report's picture to a PNG file."""
        raise NotImplementedError


def run(work: Eval, out: Path | None = None) -> dict | None:
    """Measures all pieces of `work`, writes its report to `out` (`results/NAME`) and shows it on the terminal.

    Under `accelerate launch` the pieces are shared out over the processes; the first one writes.

    Returns:
        The result as it is written to report.json; None in all processes but the first.
    """
    state = processes()
    out = out or Path("results") / work.name
    journal = Journal(out, fingerprint(work), state.process_index)
    pieces = work.pieces()
    done = union(journal.read())
    if done and state.is_main_process:
        console.say(f"Going on with a run that was stopped: {len(done)} of {len(pieces)} pieces are done")
    first = state.process_index * len(pieces) // state.num_processes
    last = (state.process_index + 1) * len(pieces) // state.num_processes
    shares = [[piece for piece in pieces[first:last] if not piece.timed]]
    shares.append([piece for piece in pieces if piece.timed and state.is_main_process])
    shares = [[piece for piece in share if piece.key not in done] for share in shares]
    total = sum(piece.size for share in shares for piece in share)
    quiet = not state.is_main_process
    try:
        with closing(journal), console.progress(total, work.title, work.unit, quiet) as bar:
            for share in shares:
                for piece in share:
                    bar.set_postfix_str(piece.key, refresh=False)
                    torch.manual_seed(work.seed)
                    journal.add(piece.key, work.measure(piece, bar.update))
                state.wait_for_everyone()
    except KeyboardInterrupt:
        console.say("Stopped; the same command goes on from here")
        raise
    done = union(journal.read())
    result = None
    if state.is_main_process:
        result = report.result(work, work.results({piece.key: done[piece.key] for piece in pieces}))
        report.write(work, result, out)
        report.show(work, result, out)
    # Not before the report is safe, and by whoever wrote them: machines need not share a disk.
    state.wait_for_everyone()
    journal.remove()
    return result


def union(records: dict[str, dict]) -> dict[str, dict]:
    """The records that any process has."""
    everyone = gather_object([records]) if processes().num_processes > 1 else [records]
    return {key: record for one in everyone for key, record in one.items()}


def fingerprint(work: Eval) -> str:
    """A digest of everything that a figure depends on: model, caches, protocol, text, seed, and the code itself."""
    model = work.loaded.model
    sources = [Path(__file__).parent, Path(kvplug.__file__).parent]
    code = hashlib.sha256(b"".join(path.read_bytes() for root in sources for path in sorted(root.rglob("*.py"))))
    told = {
        "eval": work.name,
        "model": [work.loaded.name, model.config.to_dict(), str(model.dtype), model.device.type],
        "caches": work.order,
        "protocol": work.protocol(),
        "text": work.text,
        "seed": work.seed,
        "threads": torch.get_num_threads(),
        "code": code.hexdigest(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


class Journal:
    """What is done of an unfinished run, on disk: a line of JSON for each piece, a file for each process.

    The files are named by the run's fingerprint, so that no run can take up what belongs to another.
    """

    def __init__(self, folder: Path, name: str, rank: int):
        self.folder, self.stem = folder, f".unfinished-{name[:16]}"
        self.path = folder / f"{self.stem}-{rank}.jsonl"
        self.file = None

    def read(self) -> dict[str, dict]:
        """The records of all processes' files, by key; a line that was cut off is left out."""
        found = {}
        for path in sorted(self.folder.glob(f"{self.stem}-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    key, record = json.loads(line)
                except ValueError:
                    continue
                found[key] = record
        return found

    def add(self, key: str, record: dict) -> None:
        """Writes a record down, at once."""
        if self.file is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A line that was cut off must not swallow the next one.
            self.file = self.path.open("a", encoding="utf-8")
            self.file.write("\n" if self.path.stat().st_size else "")
        self.file.write(json.dumps([key, record]) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Closes the file; `add` opens it again."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def remove(self) -> None:
        """Forgets the run: it is finished."""
        for path in self.folder.glob(f"{self.stem}-*.jsonl"):
            path.unlink(missing_ok=True)


def by_spec(work: Eval, records: dict[str, dict], pieces: Iterable[Piece]) -> dict[str, list[dict]]:
    """The records of pieces that measure one spec each (`of[0]`), in order."""
    found: dict[str, list[dict]] = {spec: [] for spec in work.order}
    for piece in pieces:
        found[piece.of[0]].append(records[piece.key])
    return found
