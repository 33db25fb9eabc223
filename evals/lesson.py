"""How the lesson of `evals.why_cache` is told: its tables, what to see in each, and its picture of four panels.

Must never say more than the result does: every figure in a sentence comes out of it.
"""

import itertools
import math
from pathlib import Path

from matplotlib.ticker import FuncFormatter, NullLocator

from evals import figure, report, specs

NONE = "none"
# Steps whose median is one point of the latency's line: a single one may be held up by another program.
BLOCK = 16
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def tables(result: dict) -> list[report.Table]:
    """All tables, in the order of the lesson."""
    return [work_table(result), cost_table(result), bytes_table(result), batch_table(result), limit_table(result)]


def growths(entry: dict) -> list[float]:
    """How often the work of a run multiplies from each number of generated tokens to the next."""
    return [b["flops"] / a["flops"] for a, b in itertools.pairwise(entry["generated"])]


def doubling(entry: dict) -> float | None:
    """The same over all of them, as a mean for each doubling of the tokens; None where there is only one number."""
    first, last = entry["generated"][0], entry["generated"][-1]
    if first["tokens"] == last["tokens"]:
        return None
    return (last["flops"] / first["flops"]) ** (1 / math.log2(last["tokens"] / first["tokens"]))


def work_table(result: dict) -> report.Table:
    """Work and time of each run."""
    heads = ["cache", "tokens generated", "GFLOPs", "growth", "seconds", "ms of the last steps", "same tokens"]
    cells = []
    for entry in result["results"]:
        differs = entry["differs_at"]
        same = "" if entry["spec"] == NONE else "yes" if differs is None else f"NO, from token {differs}"
        for case, growth in zip(entry["generated"], [None, *growths(entry)], strict=True):
            cells.append(
                [
                    entry["spec"],
                    f"{case['tokens']:,}",
                    f"{case['flops'] / 1e9:,.2f}",
                    "" if growth is None else f"× {growth:.2f}",
                    f"{case['seconds']:.2f}",
                    f"{case['last_ms']:.1f}",
                    same,
                ]
            )
    return report.Table("The same tokens, with and without a cache", heads, cells)


def cost_table(result: dict) -> report.Table:
    """What a token costs in the prompt and after it."""
    costs = result["results"][1]["costs"]
    told = {
        f"prompt of {costs['tokens']:,} at once": costs["prefill"],
        f"one token after {costs['tokens']:,}": costs["decode"],
    }
    cells = [
        [
            name,
            f"{one['ms_per_token']:.3f}",
            f"{one['flops_per_token'] / 1e6:,.2f}",
            f"{one['bytes_per_token'] / 2**20:,.3f}",
        ]
        for name, one in told.items()
    ]
    heads = ["for each token", "ms", "MFLOPs", "MiB of weights and cache read"]
    return report.Table("Prefill and decode", heads, cells)


def bytes_table(result: dict) -> report.Table:
    """Bytes held against the formula."""
    heads = [
        "heads",
        "KV heads",
        "tokens",
        "bytes by formula",
        "bytes held",
        "the same",
        "KiB / token",
        "rows that fit",
    ]
    cells = [
        [
            one["kind"],
            str(one["kv_heads"] or ""),
            f"{one['tokens']:,}",
            f"{one['formula_bytes']:,}",
            f"{one['held_bytes']:,}",
            "yes" if one["formula_bytes"] == one["held_bytes"] else "NO",
            f"{one['held_bytes'] / one['tokens'] / 1024:.3g}",
            f"{one['rows']:,}",
        ]
        for one in result["results"][1]["bytes"]
    ]
    return report.Table("The price: bytes", heads, cells)


def batch_table(result: dict) -> report.Table:
    """Tokens a second by batch."""
    batches = result["results"][1]["batches"]
    base = batches[0]["tokens_per_second"] / batches[0]["rows"]
    heads = ["rows at once", "tokens / s", "of one row alone", "ms a step"]
    cells = [
        [
            f"{one['rows']:,}",
            f"{one['tokens_per_second']:,.0f}",
            f"× {one['tokens_per_second'] / base:.1f}",
            f"{1000 * one['rows'] / one['tokens_per_second']:.1f}",
        ]
        for one in batches
    ]
    return report.Table("Rows that share the reading of the weights", heads, cells)


def limit_table(result: dict) -> report.Table:
    """Where memory ends."""
    cells = [
        [one["spec"], f"{one['row_bytes'] / 1024:,.0f}", f"{one['rows']:,}"] for one in result["results"][1]["limits"]
    ]
    title = f"Where {told_bytes(result['protocol']['memory'])} are full"
    return report.Table(title, ["cache", "KiB a row", "rows that fit beside the weights"], cells)


def notes(result: dict) -> list[str]:
    """What to see in each table, in their order."""
    none, full = result["results"][:2]
    protocol, costs = result["protocol"], full["costs"]
    speed = [f"{mean:.1f}" if (mean := doubling(entry)) else "?" for entry in (none, full)]
    prefill, decode = costs["prefill"], costs["decode"]
    differing = [entry["spec"] for entry in result["results"] if entry["differs_at"] is not None]
    shares = f"{decode['flops_per_token'] / prefill['flops_per_token']:.1f}"
    return [
        f"**With and without**: per doubling of the tokens generated the work grows {speed[0]} times without a cache "
        f"and {speed[1]} times with one. Without, each step puts all tokens so far through the model again: n steps "
        "over a growing length are n² work in the linear layers and n³ in attention, so that a doubling costs between "
        "4 and 8 times, more and more of the 8. With a cache each step puts one token through: n in the linear layers, "
        "n² in attention, between 2 and 4 times. Nothing else changes"
        + (
            f"; but the tokens of {', '.join(differing)} DIFFER from those without a cache."
            if differing
            else ": the tokens are the same."
        ),
        "FLOPs are those of all matrix products, counted as they run (attention in full, masked pairs too); seconds "
        f"are of a run without the counter, milliseconds the median of {BLOCK} steps.",
        "**Prefill and decode**: a token after the prompt takes "
        f"{decode['ms_per_token'] / prefill['ms_per_token']:.0f} times as long as one of the prompt, for {shares} "
        "times the arithmetic. The prompt's tokens go through each layer together and its weights are read once for "
        "all of them; a decoded token has them read, and its whole cache, for itself alone.",
        "**Bytes**: a cache in full precision holds 2 × layers × KV heads × head_dim × bytes of a number × tokens. "
        "Query heads that share keys and values (GQA: some, MQA: all) shrink it by as much as they share, and that "
        "many more rows fit.",
        "**Rows**: rows that decode together share the reading of the weights, and throughput grows at first. "
        "Each row brings a cache of its own, which is read for it alone (and which DynamicCache copies at each step): "
        "with many rows the caches and the arithmetic make up a step, and more rows gain nothing.",
        f"**Memory**: rows of {protocol['context']:,} tokens that fit, beside the weights, in "
        f"{told_bytes(protocol['memory'])}: computed, by the formula in full precision and by `kvplug.plan` for its "
        "own caches, spare capacity and all; nothing was filled up to find out.",
    ]


def told_bytes(count: int) -> str:
    """A number of bytes in the largest binary unit that leaves it whole, or nearly."""
    unit = next((name for name in ("GiB", "MiB", "KiB") if count >= UNITS[name]), "")
    return f"{count / UNITS[unit]:.4g} {unit or 'bytes'}"


def draw(result: dict, path: Path) -> None:
    """Draws the lesson in four panels: work, latency, what a token costs, throughput and where memory ends."""
    drawn, panels = figure.canvas("Why a KV cache: one small model, with and without", columns=4, width=11, height=8.4)
    for axes, place in zip(panels, drawn.add_gridspec(2, 2), strict=True):
        axes.set_subplotspec(place)
    drawn.get_layout_engine().set(hspace=0.06, wspace=0.06)
    draw_work(panels[0], result)
    draw_latency(panels[1], result)
    draw_costs(panels[2], result)
    draw_batches(panels[3], result)
    figure.save(drawn, path)


def name_of(spec: str) -> str:
    """A run's name in a picture."""
    return {NONE: "without a cache", specs.REFERENCE: "with a cache"}.get(spec, figure.label_of(spec))


def plain(axis, ticks: list[int]) -> None:
    """Ticks where there are values, written as plain numbers."""
    axis.set_ticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.set_minor_locator(NullLocator())


def draw_work(axes, result: dict) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for index, entry in enumerate(result["results"]):
        spots = [(case["tokens"], case["flops"] / 1e9) for case in entry["generated"]]
        mean = doubling(entry)
        label = name_of(entry["spec"]) + (f": × {mean:.1f} a doubling" if mean else "")
        axes.plot(*zip(*spots, strict=True), label=label, **figure.line_style(index))
    plain(axes.xaxis, result["protocol"]["generated"])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_title("Work: the same tokens", loc="left", fontsize=11)
    axes.set_xlabel("tokens generated", fontsize=11)
    axes.set_ylabel("GFLOPs in all", fontsize=11)
    axes.legend(frameon=False, fontsize=10)


def draw_latency(axes, result: dict) -> None:
    for index, entry in enumerate(result["results"]):
        spots = [((one["first"] + one["last"]) / 2, one["ms"]) for one in entry["latency"]]
        style = {**figure.line_style(index), "markersize": 4}
        axes.plot(*zip(*spots, strict=True), label=name_of(entry["spec"]), **style)
    axes.set_ylim(bottom=0)
    axes.set_title("Latency: the wait for each token", loc="left", fontsize=11)
    axes.set_xlabel("step", fontsize=11)
    axes.set_ylabel("ms", fontsize=11)
    axes.legend(frameon=False, fontsize=10, loc="upper left")


def draw_costs(axes, result: dict) -> None:
    costs = result["results"][1]["costs"]
    names = [f"prefill:\n{costs['tokens']:,} tokens at once", f"decode:\none after {costs['tokens']:,}"]
    parts = [costs["prefill"], costs["decode"]]
    bars = axes.bar(names, [one["ms_per_token"] for one in parts], 0.55, color=["#56B4E9", "#0072B2"], zorder=3)
    labels = [
        f"{one['ms_per_token']:.2f} ms\n{one['flops_per_token'] / 1e6:.1f} MFLOPs\n"
        f"{one['bytes_per_token'] / 2**20:.2g} MiB read"
        for one in parts
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=10)
    axes.set_ylim(0, 1.32 * max(one["ms_per_token"] for one in parts))
    axes.grid(visible=False, axis="x")
    axes.set_title("Cost of one token, with a cache", loc="left", fontsize=11)
    axes.set_ylabel("ms per token", fontsize=11)


def draw_batches(axes, result: dict) -> None:
    full, memory = result["results"][1], result["protocol"]["memory"]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    spots = [(one["rows"], one["tokens_per_second"]) for one in full["batches"]]
    axes.plot(*zip(*spots, strict=True), **figure.line_style(1))
    limits = [one for one in full["limits"] if one["rows"]]
    for index, one in enumerate(limits):
        color = figure.COLORS[2 + index % (len(figure.COLORS) - 2)]
        axes.axvline(one["rows"], color=color, linestyle="--", linewidth=1.4, zorder=2)
        name = "full precision" if one["spec"] == specs.REFERENCE else figure.label_of(one["spec"])
        axes.annotate(
            f"{name}: {one['rows']:,} ", (one["rows"], 0.02), xycoords=("data", "axes fraction"),
            ha="right", va="bottom", rotation=90, fontsize=10, color=color,
        )  # fmt: skip
    last = max([spots[-1][0], *(one["rows"] for one in limits)])
    plain(axes.xaxis, [2**power for power in range(0, last.bit_length() + 1, 1 if last <= 64 else 2)])
    axes.set_xlim(0.8, 1.3 * last)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    title = f"Throughput by batch; dashed: {told_bytes(memory)} are full"
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(f"rows at once, each of {result['protocol']['context']:,} tokens", fontsize=11)
    axes.set_ylabel("tokens per second", fontsize=11)
