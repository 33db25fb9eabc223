"""What all pictures share, and the picture of a trade-off: one point for each cache, each named where it stands.

Must stay readable at the width of a README, in grey and to the colour-blind: markers differ by shape, not only colour.
"""

import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is asked for

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Bbox

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
STYLES = {
    "kvplug, all tokens kept": dict(marker="o", color="#0072B2", markersize=9),
    "kvplug, old tokens dropped": dict(marker="D", color="#009E73", markersize=8),
    "kvplug, layers that share": dict(marker="^", color="#AA4499", markersize=9),
    "transformers": dict(marker="s", color="#D55E00", markersize=8, markerfacecolor="white", markeredgewidth=2),
}
# Parts of specs by which layers have something in common.
SHARE = ("shared", "minicache", "lowrank")
# Where a label may stand beside its point, in points: the first that touches nothing is taken.
PLACES = [
    (10, 0, "left", "center"),
    (-10, 0, "right", "center"),
    (0, 10, "center", "bottom"),
    (0, -10, "center", "top"),
    (9, 9, "left", "bottom"),
    (9, -9, "left", "top"),
    (-9, 9, "right", "bottom"),
    (-9, -9, "right", "top"),
    (0, 22, "center", "bottom"),
    (0, -22, "center", "top"),
    (16, 20, "left", "bottom"),
    (16, -20, "left", "top"),
    (-16, 20, "right", "bottom"),
    (-16, -20, "right", "top"),
    (0, 36, "center", "bottom"),
    (0, -36, "center", "top"),
]


# For pictures with a line for each cache: colours in Okabe and Ito's order, told apart by markers as well.
COLORS = ["#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X", "*", "<", ">"]


def line_style(index: int) -> dict:
    """Colour and marker of the `index`th line of a picture."""
    return dict(color=COLORS[index % len(COLORS)], marker=MARKERS[index % len(MARKERS)], markersize=6, linewidth=1.6)


def canvas(title: str, columns: int = 1, width: float = 9.0, height: float = 5.0):
    """A figure and `columns` axes side by side, in the style of all pictures here."""
    figure, axes = plt.subplots(1, columns, figsize=(width, height), dpi=160, layout="constrained", squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    for one in axes[0]:
        one.grid(color="#dddddd", linewidth=0.8, zorder=0)
        one.tick_params(labelsize=10, length=0)
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes[0]


def counts(axes, values: list[int]) -> None:
    """A logarithmic axis along the bottom, with a tick at each of `values`."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())


def heat_map(axes, values: list[list[float]], across: list[str], down: list[str]):
    """Shares from 0 to 1 as coloured cells with their figure in each, first row on top; returns what a bar can explain.

    The colours run from dark to light in grey as well, and stay apart for every kind of colour vision.
    """
    colored = axes.pcolormesh(values, cmap="cividis", vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            shade = "black" if value > 0.4 else "white"
            axes.text(column + 0.5, row + 0.5, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
    axes.invert_yaxis()
    axes.set_xticks([i + 0.5 for i in range(len(across))], across)
    axes.set_yticks([i + 0.5 for i in range(len(down))], down)
    axes.tick_params(labelsize=9, length=0)
    axes.spines[:].set_visible(False)
    return colored


def save(figure, path: Path) -> None:
    """Writes a figure to a PNG file, and lets go of it."""
    figure.savefig(path)
    plt.close(figure)


def style_of(entry: dict) -> str:
    """Which of `STYLES` a result belongs to."""
    if entry["spec"].startswith("transformers:"):
        return "transformers"
    if any(part.partition(":")[0] in SHARE for part in entry["spec"].split("+")):
        return "kvplug, layers that share"
    return "kvplug, old tokens dropped" if entry["memory"]["drops_tokens"] else "kvplug, all tokens kept"


def tradeoff(result: dict, path: Path) -> None:
    """Draws KL against bits held per element of the context, both logarithmic, to a PNG file at `path`."""
    # A cache whose predictions are no numbers has no place in it.
    entries = [entry for entry in result["results"] if math.isfinite(entry["quality"]["kl"])]
    positive = [entry["quality"]["kl"] for entry in entries if entry["quality"]["kl"] > 1e-7]
    # An exact cache has no place on a logarithmic axis: it stands on a line of its own, two steps below the rest.
    floor = 10 ** (math.floor(math.log10(min(positive, default=1e-3))) - 1)
    figure, axes = plt.subplots(figsize=(9, 5.4), dpi=160, layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    points = []
    for name, style in STYLES.items():
        own = [entry for entry in entries if style_of(entry) == name]
        spots = [(entry["memory"]["bits_held"], max(entry["quality"]["kl"], floor)) for entry in own]
        if own:
            axes.plot(*zip(*spots, strict=True), linestyle="none", label=name, zorder=3, **style)
        points += [(spot, label_of(entry["spec"]), style["color"]) for entry, spot in zip(own, spots, strict=True)]
    decorate(axes, [spot for spot, _, _ in points], floor)
    model = Path(result["model"]["name"]).name
    axes.set_title(f"{model}: what a cache holds, and what that does to its predictions", loc="left", fontsize=12)
    axes.legend(loc="best", frameon=False, fontsize=10)
    figure.canvas.draw()
    place_labels(figure, axes, points)
    save(figure, path)


def label_of(spec: str) -> str:
    """A spec as short as it stays clear beside its point: argument names go, `transformers:` becomes `hf`."""
    if spec.startswith("transformers:"):
        return "hf " + spec.removeprefix("transformers:")
    parts = []
    for part in spec.split("+"):
        name, _, arguments = part.partition(":")
        values = [short(argument.partition("=")[2]) for argument in arguments.split(",") if argument]
        parts.append(f"{name} {'+'.join(values)}".strip())
    return ", ".join(parts)


def short(value: str) -> str:
    """An argument's value: of a file its name alone, of long lists the beginning."""
    value = Path(value).stem if value.endswith((".json", ".safetensors")) else value
    return value if len(value) <= 12 else f"{value[:8]}…"


def decorate(axes, spots: list[tuple[float, float]], floor: float) -> None:
    """Axes, ticks and grid."""
    bits = [spot[0] for spot in spots]
    low, high = math.floor(math.log2(min(bits)) - 0.6), math.ceil(math.log2(max(bits)) + 0.5)
    axes.set_xlim(2.0**low, 2.0**high)
    axes.xaxis.set_major_locator(FixedLocator([2.0**power for power in range(low, high + 1)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    top = 10 ** math.ceil(math.log10(max(max(spot[1] for spot in spots), floor * 10)) + 0.1)
    axes.set_ylim(floor / 2, top)
    powers = range(round(math.log10(floor)), round(math.log10(top)) + 1)
    axes.yaxis.set_major_locator(FixedLocator([10.0**power for power in powers]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: "exact" if value <= floor * 1.01 else f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="#dddddd", linewidth=0.8, zorder=0)
    axes.tick_params(labelsize=10, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bits held per element of the context, everything counted (← less memory)", fontsize=11)
    axes.set_ylabel("KL to the full cache, nats per token (↓ better)", fontsize=11)


def place_labels(figure, axes, points: list[tuple[tuple[float, float], str, str]]) -> None:
    """Writes each label at the first of `PLACES` where it touches no other label, no marker and no edge."""
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    spots = [axes.transData.transform(spot) for spot, _, _ in points]
    taken = [Bbox.from_bounds(x - 6 * scale, y - 6 * scale, 12 * scale, 12 * scale) for x, y in spots]
    taken.append(axes.get_legend().get_window_extent(renderer))
    inside = axes.get_window_extent(renderer)
    for (spot, text, color), own in sorted(zip(points, list(taken), strict=False), key=lambda pair: pair[0][0]):
        best = None
        for dx, dy, horizontal, vertical in PLACES:
            label = axes.annotate(
                text, spot, xytext=(dx, dy), textcoords="offset points", ha=horizontal, va=vertical,
                fontsize=10, color=color,
            )  # fmt: skip
            box = label.get_window_extent(renderer)
            touched = sum(_overlap(box, other) for other in taken if other is not own)
            touched += box.width * box.height - _overlap(box, inside)
            if best is None or touched < best[0]:
                if best is not None:
                    best[1].remove()
                best = (touched, label, box)
            else:
                label.remove()
            if touched == 0:
                break
        taken.append(best[2])


def _overlap(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return shared.width * shared.height if shared is not None else 0.0
