"""How the times of `evals.throughput` are put on paper: ratios with their spread, tokens a second, and their picture.

Must never show a ratio where there is a fault: it shows the fault.
"""

from pathlib import Path

from evals import figure, report


def where(timing: dict) -> str:
    """The length, and the batch where it isn't one."""
    return f"{timing['tokens']:,}" + (f" × {timing['batch']}" if timing["batch"] > 1 else "")


def timing_table(result: dict, kind: str, title: str) -> report.Table:
    """Milliseconds and ratio of each cache, a pair of columns for each length and batch."""
    heads = ["cache"]
    for timing in result["results"][0][kind]:
        heads += [f"ms at {where(timing)}", f"ratio at {where(timing)}"]
    cells = []
    for entry in result["results"]:
        row = [entry["spec"]]
        for timing in entry[kind]:
            row += [f"{timing['ms']:,.1f}", ratio_cell(timing)]
        cells.append(row)
    return report.Table(title, heads, cells)


def rate_table(result: dict) -> report.Table:
    """Decoded tokens a second over all rows, for each length and batch."""
    heads = ["cache", *(f"at {where(timing)}" for timing in result["results"][0]["decode"])]
    cells = [
        [entry["spec"], *(f"{timing['tokens_per_second']:,.1f}" for timing in entry["decode"])]
        for entry in result["results"]
    ]
    return report.Table("Tokens a second, all rows together", heads, cells)


def ratio_cell(timing: dict | None) -> str:
    """A ratio with its spread, or the reason why there is none."""
    if not timing:
        return ""
    if timing["fault"]:
        return f"none: {timing['fault']}"
    return f"{timing['ratio']:.2f} ({timing['ratio_low']:.2f}–{timing['ratio_high']:.2f})"


def draw(result: dict, path: Path) -> None:
    """Draws ratios for prompts and decoding, and tokens a second by batch where there are several, to a PNG file."""
    prompts, batches = result["protocol"]["prompt"], result["protocol"]["batch"]
    panels = [("prefill", "prompt, tokens", "time to first token")] if prompts else []
    panels += [("decode", "tokens in the cache", "time per output token")] if result["protocol"]["tokens"] else []
    several = len(batches) > 1 and bool(result["protocol"]["tokens"])
    model = Path(result["model"]["name"]).name
    columns = len(panels) + several
    drawn, axes = figure.canvas(f"{model}: speed against DynamicCache", columns=columns, width=2.5 + 4.5 * columns)
    for index, entry in enumerate(result["results"]):
        style = dict(label=figure.label_of(entry["spec"]), capsize=3, **figure.line_style(index))
        for (kind, _, _), panel in zip(panels, axes, strict=False):
            shown = [x for x in entry[kind] if x["batch"] == batches[0] and x["ratio"] is not None]
            ratios = [x["ratio"] for x in shown]
            spread = [
                [x["ratio"] - x["ratio_low"] for x in shown],
                [x["ratio_high"] - x["ratio"] for x in shown],
            ]
            panel.errorbar([x["tokens"] for x in shown], ratios, yerr=spread, **style)
        if several:
            longest = max(result["protocol"]["tokens"])
            shown = [x for x in entry["decode"] if x["tokens"] == longest and x["fault"] is None]
            axes[-1].plot([x["batch"] for x in shown], [x["tokens_per_second"] for x in shown],
                          label=figure.label_of(entry["spec"]), **figure.line_style(index))  # fmt: skip
    for (kind, below, left), panel in zip(panels, axes, strict=False):
        figure.counts(panel, prompts if kind == "prefill" else result["protocol"]["tokens"])
        panel.axhline(1, color="#999999", linewidth=1, zorder=1)
        panel.set_xlabel(below, fontsize=11)
        panel.set_ylabel(f"{left}, ratio (↓ faster)", fontsize=11)
        panel.set_ylim(bottom=0)
    if several:
        figure.counts(axes[-1], batches)
        axes[-1].set_xlabel(f"rows, with {max(result['protocol']['tokens']):,} tokens each", fontsize=11)
        axes[-1].set_ylabel("tokens a second (↑ better)", fontsize=11)
        axes[-1].set_ylim(bottom=0)
    axes[-1].legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.save(drawn, path)
