"""Layers that share: `python -m evals.sharing`, what it costs a model that was trained without.

It searches for a plan (`kvplug.calibrate_sharing`) and finds bases (`kvplug.calibrate_low_rank`) on pieces of the text
that no window touches, and measures both beside neighbours that share unasked and merged layers. Must never measure in
a way of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
import typer

import kvplug
from evals import console, figure, models, perplexity, report, runner, specs, texts
from evals.errors import InputError
from evals.perplexity import Perplexity
from evals.teacher import Protocol
from kvplug import SharingPlan

# In the place of `{plan}` and `{low_rank}` come the files of plans, of `{neighbours}` pairs of the deepest layers, as
# many as the plan shares.
DEFAULT_CACHES = [
    "dense",
    "shared:groups={neighbours}",
    "shared:plan={plan}",
    "shared:plan={plan}+int4",
    "shared:groups=cla2",
    "shared:groups=yoco",
    "minicache:start=8",
    "minicache:start=8+int4",
    "lowrank:plan={low_rank},rank=0.3",
    "lowrank:plan={low_rank},rank=0.3+int4",
    "int4",
]


@dataclass
class Sharing(Perplexity):
    """Perplexity through each cache, and what the search for a plan told."""

    plan: SharingPlan = None

    name: ClassVar[str] = "sharing"
    title: ClassVar[str] = "Layers that share"

    def protocol(self) -> dict:
        told = {"calibration_tokens": self.plan.report["tokens"], "groups": self.plan.groups}
        return super().protocol() | told

    def tables(self, result: dict) -> list[report.Table]:
        cells = [
            [str(number), str(step["layer"]), str(step["owner"]), f"{step['kl']:.4f}"]
            for number, step in enumerate(self.plan.report["steps"], 1)
        ]
        heads = ["layers given up", "layer", "reads layer", "KL of all so far"]
        return [*super().tables(result)[:1], report.Table("The plan, on the calibration text", heads, cells)]

    def draw(self, result: dict, path: Path) -> None:
        figure.tradeoff(result, path)


def outside(ids: torch.Tensor, cut: texts.Windows, pieces: int, tokens: int) -> list[torch.Tensor]:
    """Token numbers of `pieces` pieces of a text, spread over all of it that is in none of the windows.

    Raises:
        InputError: that is too short.
    """
    free = torch.ones(len(ids), dtype=torch.bool)
    for start in cut.starts:
        free[start : start + cut.ids.shape[1]] = False
    # Only places from where so many tokens are free.
    blocked = (~free).long().cumsum(0)
    places = [i for i in range(0, len(ids) - tokens, tokens) if free[i] and blocked[i + tokens] == blocked[i]]
    if len(places) < pieces:
        raise InputError(
            f"--dataset: outside of the windows there is room for {len(places)} pieces of {tokens:,} tokens, and "
            f"{pieces} are needed; give a longer text, or ask for fewer windows"
        )
    chosen = [places[(2 * i + 1) * len(places) // (2 * pieces)] for i in range(pieces)]
    return [ids[place : place + tokens] for place in chosen]


def neighbours(plan: SharingPlan, layers: int) -> str:
    """Pairs of neighbours among the deepest of `layers` layers, as many as the plan has layers that borrow."""
    pairs = min(sum(len(group) - 1 for group in plan.groups), layers // 2)
    return "/".join(f"{i}-{i + 1}" for i in range(layers - 2 * pairs, layers, 2))


def main(
    cache: console.CacheOption = DEFAULT_CACHES,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    share: Annotated[float, typer.Option("--share", help="The part of the layers that are to store nothing.")] = 0.25,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="A plan that was found before, rather than a search.")
    ] = None,
    pieces: Annotated[int, typer.Option("--pieces", min=1, help="Pieces of text that the search reads.")] = 4,
    piece_tokens: Annotated[int, typer.Option("--piece-tokens", min=2, help="Tokens of each.")] = 256,
    basis_tokens: Annotated[
        int, typer.Option("--basis-tokens", min=2, help="Tokens of each piece that bases are found on.")
    ] = 1024,
    prefill: Annotated[int, typer.Option("--prefill", help="Tokens of prompt, fed at once.")] = Protocol.prefill,
    step: Annotated[int, typer.Option("--step", help="Tokens fed at a time after it.")] = Protocol.step,
    length: Annotated[int, typer.Option("--length", help="Tokens in a window.")] = Protocol.length,
    windows: console.WindowsOption = 1,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Searches for layers that may share, and measures what that costs beside other ways to share."""
    protocol = Protocol(prefill=prefill, step=step, length=length)
    text = texts.read(dataset, column=column)
    loaded, _ = perplexity.prepare(model, ["dense"], device, dtype, length)
    cut = texts.windows(loaded.tokenizer, text, length=length, count=windows)
    out = out or Path("results") / Sharing.name
    out.mkdir(parents=True, exist_ok=True)
    ids = torch.tensor(loaded.tokenizer(text.content, add_special_tokens=False, verbose=False).input_ids)
    if plan is None:
        plan = out / "plan.json"
        try:
            kvplug.calibrate_sharing(loaded.model, outside(ids, cut, pieces, piece_tokens), share, path=plan)
        except ValueError as error:
            raise InputError(f"--share: {error}") from error
    low_rank = out / "low_rank.safetensors"
    if any("{low_rank}" in spec for spec in cache):
        try:
            kvplug.calibrate_low_rank(loaded.model, outside(ids, cut, pieces, basis_tokens), path=low_rank)
        except ValueError as error:
            raise InputError(f"--basis-tokens: {error}") from error
    kvplug.detach(loaded.model)
    try:
        found = SharingPlan.load(plan)
    except (OSError, ValueError) as error:
        raise InputError(f"--plan: {error}") from error
    layers = loaded.model.config.get_text_config().num_hidden_layers
    filled = {"{plan}": str(plan), "{low_rank}": str(low_rank), "{neighbours}": neighbours(found, layers)}
    for name, value in filled.items():
        cache = [spec.replace(name, value) for spec in cache]
    cache = specs.check(cache, loaded.model)
    about = (loaded, cache, seed, texts.told(text, cut))
    runner.run(Sharing(*about, ids=cut.ids, steps=protocol, plan=found), out)


if __name__ == "__main__":
    console.run(main)
