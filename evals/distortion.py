"""What each codec does to numbers: `python -m evals.distortion`, on Gaussian numbers and a model's keys and values.

No cache and no attention is involved, so nothing here tells what a codec does to a model's words. Must never count a
codec's bits without its scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from transformers import DynamicCache

from evals import console, figure, models, report, runner, texts
from evals.errors import InputError, first_line
from evals.models import forward
from evals.runner import Eval, Piece
from kvplug.codecs import Codec, get_codec
from kvplug.spec import parse

DEFAULT_CODECS = [
    *("fp8", "fp8_e5m2", "int8", "int4", "int3", "int2"),
    *(f"quant:dtype=int{bits},scheme=lloyd_max" for bits in (4, 3, 2)),
    *(f"quant:dtype=int{bits},scheme={scheme}" for scheme in ("channel", "token", "group") for bits in (4, 2)),
]
# Least squared error that 2**bits levels can have for a Gaussian of variance 1: Max, "Quantizing for minimum
# distortion", 1960; Lloyd, "Least squares quantization in PCM", 1982.
LLOYD_MAX = {2: 0.1175, 3: 0.0345, 4: 0.0095}
# Caches keep the first tokens as they are; their keys are unlike all others.
SINKS = 4
SIDES = ("gaussian", "keys", "values")
NOTES = [
    "**error** is the sum of squared errors over the sum of squares: of independent Gaussian numbers, and of the keys "
    f"and values of all layers for one window of text, without the first {SINKS} tokens. The smallest that 2, 3 and 4 "
    "bits can do to a Gaussian one number at a time is 0.1175, 0.0345 and 0.0095 (Lloyd–Max); by no means can b bits "
    "do less than 4^−b (Shannon), where b counts the scales too. Keys are no Gaussian: their channels have means, "
    "which groups of tokens store once. Gaussian numbers "
    "are written as values are; where keys are written otherwise, it is for the sake of their products with queries, "
    "at the price of a larger error.",
    "**bits** are all bits that are stored for a number, with scales, zero points and offsets.",
]


@dataclass
class Distortion(Eval):
    """Encodes Gaussian numbers and the keys and values of `ids` `[1, tokens]`; a piece is one codec."""

    ids: torch.Tensor = None
    samples: int = 1 << 20
    _read: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    name: ClassVar[str] = "distortion"
    title: ClassVar[str] = "Distortion by codec"
    unit: ClassVar[str] = "layer"

    @property
    def order(self) -> list[str]:
        """The codecs alone: there is no reference but the numbers themselves."""
        return list(dict.fromkeys(self.caches))

    def protocol(self) -> dict:
        return {"tokens": self.ids.shape[1], "samples": self.samples, "sinks": SINKS}

    def pieces(self) -> list[Piece]:
        return [Piece(spec, 1, (spec,)) for spec in self.order]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        """Errors and bits of one codec."""
        codecs = codecs_of(piece.of[0])
        layers = self.read()
        shape = layers[0][0].shape
        gaussian = torch.randn(1, shape[1], max(self.samples // (shape[1] * shape[3]), 1), shape[3])
        record = {
            "gaussian": error(codecs[1], [gaussian]),
            "keys": error(codecs[0], [keys for keys, _ in layers]),
            "values": error(codecs[1], [values for _, values in layers]),
            "bits": sum(bits(codec, x) for codec, x in zip(codecs, layers[0], strict=True)) / 2,
        }
        tick(1)
        return record

    def read(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values `[1, kv_heads, tokens, head_dim]` of each layer, read from the model once."""
        if not self._read:
            model = self.loaded.model
            cache = DynamicCache(config=model.config)
            with torch.no_grad():
                forward(model, self.ids.to(model.device), cache, logits_to_keep=1)
            self._read = [(layer.keys[:, :, SINKS:], layer.values[:, :, SINKS:]) for layer in cache.layers]
        return self._read

    def results(self, records: dict[str, dict]) -> list[dict]:
        return [{"spec": spec, **records[spec]} for spec in self.order]

    def tables(self, result: dict) -> list[report.Table]:
        cells = [
            [
                entry["spec"],
                f"{entry['bits']:.2f}",
                *(f"{entry[side]:.5f}" for side in SIDES),
                f"{4 ** -entry['bits']:.5f}",
            ]
            for entry in result["results"]
        ]
        cells += [
            [f"Lloyd–Max, {b} bits", f"{b}", f"{least:.5f}", "", "", f"{4.0**-b:.5f}"] for b, least in LLOYD_MAX.items()
        ]
        return [report.Table("Squared error over squares", ["codec", "bits", *SIDES, "4^−bits"], cells)]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


def codecs_of(spec: str) -> tuple[Codec, Codec]:
    """The codecs of keys and values that a spec names.

    Raises:
        InputError: it has a typo, or names more than a codec.
    """
    try:
        found = parse(spec)
    except ValueError as error:
        raise InputError(f"--cache: '{spec}': {first_line(error)}") from error
    if found.policy is not None or get_codec(None) in found.codec:
        raise InputError(
            f"--cache: '{spec}' is not a codec alone; accepted are specs such as {', '.join(DEFAULT_CODECS)}"
        )
    return found.codec


def error(codec: Codec, tensors: list[torch.Tensor]) -> float:
    """Sum of squared errors over sum of squares, over all tensors `[batch, kv_heads, tokens, head_dim]`."""
    lost = kept = 0.0
    for x in tensors:
        x = x.float()
        lost += (codec.decode(codec.encode(x), torch.float32).double() - x).square().sum().item()
        kept += x.double().square().sum().item()
    return lost / kept


def bits(codec: Codec, x: torch.Tensor) -> float:
    """Bits stored for a number of `x`, in whole groups."""
    dim = x.shape[-1]
    return 8 * codec.nbytes(codec.granule, 1, dim) / (codec.granule * dim)


def draw(result: dict, path: Path) -> None:
    """Draws the error against the bits, a panel each for Gaussian numbers, keys and values, with the line 4^-bits."""
    model = Path(result["model"]["name"]).name
    drawn, panels = figure.canvas(f"{model}: what codecs do to numbers", columns=3, width=13, height=4.8)
    entries = result["results"]
    ends = [min(entry["bits"] for entry in entries), max(entry["bits"] for entry in entries)]
    for axes, side in zip(panels, SIDES, strict=True):
        axes.set_yscale("log")
        axes.plot(ends, [4.0**-end for end in ends], color="#7F7F7F", linewidth=1.4, label="4^−bits")
        if side == "gaussian":
            axes.plot(*zip(*LLOYD_MAX.items(), strict=True), "k_", markersize=16, markeredgewidth=2, label="Lloyd–Max")
        for index, entry in enumerate(entries):
            style = figure.line_style(index) | {"linestyle": "none"}
            axes.plot([entry["bits"]], [entry[side]], label=figure.label_of(entry["spec"]), **style)
        axes.set_title(side if side != "gaussian" else "Gaussian numbers", loc="left", fontsize=11)
        axes.set_xlabel("bits a number, scales counted", fontsize=11)
    panels[0].set_ylabel("squared error over squares (↓ better)", fontsize=11)
    handles, labels = panels[0].get_legend_handles_labels()
    panels[-1].legend(handles, labels, frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)


def main(
    cache: console.CacheOption = DEFAULT_CODECS,
    model: console.ModelOption = models.EMBEDDED,
    dataset: console.DatasetOption = texts.EMBEDDED,
    column: console.ColumnOption = None,
    length: Annotated[int, typer.Option("--length", min=SINKS + 1, help="Tokens in the window of text.")] = 1028,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Gaussian numbers, about.")] = 1 << 20,
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Squared error of each codec on Gaussian numbers and on the model's own keys and values."""
    for spec in cache:
        codecs_of(spec)
    text = texts.read(dataset, column=column)
    loaded = models.load(model, device=device, dtype=dtype)
    if loaded.max_positions is not None and length > loaded.max_positions:
        raise InputError(f"--length: got {length:,}, accepted is up to the model's {loaded.max_positions:,} positions")
    cut = texts.windows(loaded.tokenizer, text, length=length, count=1)
    runner.run(Distortion(loaded, cache, seed, texts.told(text, cut), ids=cut.ids, samples=samples), out)


if __name__ == "__main__":
    console.run(main)
