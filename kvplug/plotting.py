"""The picture of a plan: bytes of each cache against the length of a request. Needs matplotlib, which is asked for here
and nowhere else.

Must stay readable in grey and to the colour-blind: lines differ by dash, and each is named where it ends.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is asked for

from matplotlib import pyplot as plt
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from kvplug.memory import human
from kvplug.planning import Planner

# Okabe and Ito's colours, without the yellow that paper swallows.
COLOURS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("solid", (0, (6, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)), (0, (3, 1.5)), (0, (8, 2, 1, 2, 1, 2)))


def draw(
    planners: list[tuple[str, Planner, int | None]],
    path: Path,
    title: str,
    lengths: list[int],
    batch: int,
    memory: int | None = None,
    memory_name: str = "",
) -> None:
    """Draws to a PNG file at `path`, both axes in powers of two.

    Args:
        planners: each after the name of its line, and before the number of tokens that fit `memory`, if that is known.
        lengths: lengths of requests that must be in the picture, in tokens.
        batch: requests in a cache.
        memory: bytes, marked by a line of its own that is called `memory_name`.
    """
    last = max(*lengths, 32768)
    if memory is not None:
        # As far as the cache that needs least still grows, but no further than 16 times what was asked about.
        fits = [count for _, _, count in planners if count]
        last = max(last, min(max(fits, default=0) * 5 // 4, 16 * last))
    tokens = spaced(1024, last)
    figure, axes = plt.subplots(figsize=(10, 5.8), dpi=150, layout="constrained")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    ends = []
    for number, (name, planner, count) in enumerate(planners):
        style = {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)]}
        sizes = [planner.report(count, batch).total for count in tokens]
        axes.plot(tokens, sizes, linewidth=2.2, zorder=3, **style)
        ends.append((sizes[-1], name, style["color"]))
        if count and tokens[0] <= count <= last:
            axes.plot([count], [memory], "o", markersize=6, color=style["color"], zorder=4, clip_on=False)
    decorate(axes, tokens, title)
    if memory is not None:
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, memory / 4), max(high, memory * 2))
        axes.axhline(memory, color="#555555", linewidth=1.2, zorder=2)
        axes.annotate(
            f"{memory_name} for the cache", (tokens[0], memory), xytext=(4, 4), textcoords="offset points",
            color="#333333", fontsize=10,
        )  # fmt: skip
    figure.canvas.draw()
    name_lines(axes, ends)
    figure.savefig(path)
    plt.close(figure)


def spaced(first: int, last: int) -> list[int]:
    """About 60 lengths, evenly spaced on a logarithmic axis, the last one included."""
    ratio = (last / first) ** (1 / 60)
    return sorted({*(round(first * ratio**step) for step in range(60)), last})


def decorate(axes, tokens: list[int], title: str) -> None:
    """Axes, ticks and grid."""
    axes.set_title(f"What a cache holds: {title}", loc="left", fontsize=12)
    axes.set_xlim(tokens[0], tokens[-1])
    powers = [1 << power for power in range(tokens[0].bit_length() - 1, tokens[-1].bit_length())]
    axes.xaxis.set_major_locator(FixedLocator(powers[:: -(-len(powers) // 13)]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(round(value))))
    low, high = axes.get_ylim()
    exponents = range(max(int(low), 1).bit_length() - 1, int(high).bit_length() + 1)
    axes.yaxis.set_major_locator(FixedLocator([2.0**power for power in exponents[:: -(-len(exponents) // 13)]]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: human(round(value)).replace(".00", "")))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color="#dddddd", linewidth=0.8, zorder=0)
    axes.tick_params(labelsize=10, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens in a request, prompt and answer together (K = 1,024)", fontsize=11)
    axes.set_ylabel("bytes held, spare capacity included", fontsize=11)


def thousands(tokens: int) -> str:
    if tokens >= 1 << 20:
        return f"{tokens / (1 << 20):g}M"
    return f"{tokens / 1024:g}K" if tokens >= 1024 else str(tokens)


def name_lines(axes, ends: list[tuple[int, str, str]]) -> None:
    """Names each line right of its end; names that would touch are moved apart, and a thin line leads to each."""
    scale = 72 / axes.figure.dpi
    right = axes.get_xlim()[1]
    heights = [axes.transData.transform((right, size))[1] * scale for size, _, _ in ends]
    order = sorted(range(len(ends)), key=heights.__getitem__)
    places = list(heights)
    for before, after in pairwise(order):
        places[after] = max(places[after], places[before] + 14)
    for place in order:
        size, name, colour = ends[place]
        axes.annotate(
            name, (right, size), xytext=(14, places[place] - heights[place]), textcoords="offset points",
            va="center", fontsize=10, color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 2,
                        "relpos": (0, 0.5)},
        )  # fmt: skip
