"""The report: what is written can be read back, figures that are none are said so, labels never touch."""

import json

import pytest
from matplotlib import pyplot as plt

from evals import figure, report


def entry(spec, kl, bits, drops=False, **decode):
    return {
        "spec": spec,
        "quality": {"perplexity": 9.0, "kl": kl, "top1_agreement": 0.9, "predictions": 10},
        "memory": {
            "held_bytes": 1000,
            "bytes_per_token": 12345.6,
            "bits_held": bits,
            "bits_stored": None,
            "drops_tokens": drops,
            "report": None,
            "report_agrees": None,
        },
        "decode": {"fault": None, "ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.6, **decode},
    }


@pytest.fixture
def result(tiny):
    entries = [
        entry("transformers:dynamic", 0.0, 32.0),
        entry("dense", 0.0, 36.0),
        entry("int8", 0.0002, 9.6),
        entry("fp8", 0.0047, 9.3),
        entry("int4", 0.0251, 5.2),
        entry("window:window=512", 1.9, 10.8, drops=True),
        entry("streaming:sinks=4,window=508", 0.12, 10.8, drops=True),
        entry("streaming:sinks=4,window=508+int4", 0.16, 1.6, drops=True),
        entry("transformers:fp8", 0.0151, 8.0),
        entry("transformers:hqq4", 0.0183, 7.23, fault="its output is not finite"),
    ]
    return report.result("tradeoff", tiny, seed=3, protocol={"step": 1}, results=entries)


def test_what_is_written_is_what_was_measured(result, tmp_path):
    rows = report.tradeoff_table(result)
    report.write(result, rows, tmp_path / "a" / "b", notes=["a note"], picture="p.png")
    assert json.loads((tmp_path / "a" / "b" / "report.json").read_text()) == result
    written = (tmp_path / "a" / "b" / "report.md").read_text()
    assert "| `int8` | 9.000 | 0.0002 | 0.900 | 9.60 |  | 12,346 | 0.50 (0.40–0.60) |" in written
    assert "![Quality against memory](p.png)" in written
    assert "seed 3" in written
    assert "- a note" in written


def test_a_cache_without_a_ratio_says_why(result):
    cells = {row[0]: row[-1] for row in report.tradeoff_table(result).cells}
    assert cells["transformers:hqq4"] == "none: its output is not finite"


def test_what_is_no_number_is_null_in_json_and_left_out_of_the_picture(result, tmp_path):
    result["results"].append(entry("broken", float("nan"), 4.0))
    rows = report.tradeoff_table(result)
    report.write(result, rows, tmp_path, notes=[])
    figure.tradeoff(result, tmp_path / "tradeoff.png")
    assert json.loads((tmp_path / "report.json").read_text())["results"][-1]["quality"]["kl"] is None
    assert rows.cells[-1][2] == "nan"


def test_peak_memory_has_a_column_where_it_was_measured(result):
    assert "peak MiB" not in report.tradeoff_table(result).heads
    for one in result["results"]:
        one["memory"]["peak_device_bytes"] = 3 << 20
    rows = report.tradeoff_table(result)
    assert rows.heads[-1] == "peak MiB"
    assert {row[-1] for row in rows.cells} == {"3"}


def test_the_machine_is_named_without_its_host(result):
    import platform

    assert platform.node() not in result["machine"]
    assert "cores" in result["machine"]


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        ("int4", "int4"),
        ("window:window=512", "window 512"),
        ("streaming:sinks=4,window=508+int4", "streaming 4+508, int4"),
        ("transformers:hqq4", "hf hqq4"),
    ],
)
def test_labels_are_short(spec, label):
    assert figure.label_of(spec) == label


def test_no_label_touches_another(result, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(figure.plt, "close", kept.append)
    figure.tradeoff(result, tmp_path / "tradeoff.png")
    [drawn] = kept
    renderer = drawn.canvas.get_renderer()
    boxes = [text.get_window_extent(renderer) for text in drawn.axes[0].texts]
    monkeypatch.undo()
    plt.close(drawn)
    assert len(boxes) == len(result["results"])
    for i, one in enumerate(boxes):
        assert not any(figure._overlap(one, other) for other in boxes[:i])
