"""The report: what is written can be read back, figures that are none are said so, labels never touch."""

import base64
import io
import json
from html.parser import HTMLParser

import pytest
import torch
from matplotlib import pyplot as plt
from PIL import Image

from evals import figure, perplexity, report
from evals.perplexity import Perplexity
from evals.throughput import Throughput
from evals.tradeoff import Tradeoff


def entry(spec, kl, bits, drops=False, **decode):
    return {
        "spec": spec,
        "quality": {"perplexity": 9.0, "kl": kl, "top1_agreement": 0.9, "predictions": 10},
        "memory": {
            "held_bytes": 1000,
            "bytes_per_token": 12345.6,
            "bits_held": bits,
            "bits_stored": None,
            "bits_at_16": None,
            "drops_tokens": drops,
            "report": None,
            "report_agrees": None,
            "peak_device_bytes": None,
        },
        "decode": {"fault": None, "ratio": 0.5, "ratio_low": 0.4, "ratio_high": 0.6, **decode},
    }


@pytest.fixture
def work(tiny):
    timing = Throughput(tiny, [], tokens=[100])
    return Tradeoff(tiny, [], seed=3, reading=Perplexity(tiny, [], ids=torch.zeros(1, 1536)), timing=timing)


@pytest.fixture
def result(work):
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
    return report.result(work, entries)


def test_what_is_written_is_what_was_measured(work, result, tmp_path):
    report.write(work, result, tmp_path / "a" / "b")
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == sorted([*report.FILES, "tradeoff.png"])
    assert json.loads((tmp_path / "a" / "b" / "report.json").read_text()) == result
    written = (tmp_path / "a" / "b" / "report.md").read_text()
    assert "| `int8` | 9.000 | 0.0002 | 0.900 | 9.60 |  |  | 12,346 | 0.50 (0.40–0.60) |" in written
    assert "![Quality against memory](tradeoff.png)" in written
    assert "seed 3" in written
    assert f"- {perplexity.NOTES[0]}" in written


class Page(HTMLParser):
    """Cells, pictures and references of an HTML page."""

    def __init__(self, text):
        super().__init__()
        self.cells, self.pictures, self.outside, self.open = [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag in ("td", "th"):
            self.cells.append("")
            self.open = tag
        if tag == "img":
            self.pictures.append(attributes["src"])
        self.outside += [attributes[x] for x in ("href", "src") if not attributes.get(x, "data:").startswith("data:")]

    def handle_endtag(self, tag):
        self.open = None if tag == self.open else self.open

    def handle_data(self, data):
        if self.open:
            self.cells[-1] += data


def test_the_page_holds_table_and_picture_and_needs_no_other_file(work, result, tmp_path):
    result["results"][0]["spec"] = "<script>&"
    report.write(work, result, tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    [table] = work.tables(result)
    assert page.cells == [*table.heads, *(cell for row in table.cells for cell in row)]
    assert page.outside == []
    [picture] = page.pictures
    kind, data = picture.split(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as shown:
        assert shown.size[0] > 600
    assert "<script>" not in text and "**" not in text


def test_a_cache_without_a_ratio_says_why(work, result):
    [table] = work.tables(result)
    cells = {row[0]: row[-1] for row in table.cells}
    assert cells["transformers:hqq4"] == "none: its output is not finite"


def test_what_is_no_number_is_null_in_json_and_left_out_of_the_picture(work, result, tmp_path):
    result["results"].append(entry("broken", float("nan"), 4.0))
    report.write(work, result, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["results"][-1]["quality"]["kl"] is None
    assert work.tables(result)[0].cells[-1][2] == "nan"


def test_peak_memory_has_a_column_where_it_was_measured(result):
    assert "peak MiB" not in perplexity.quality_table(result).heads
    for one in result["results"]:
        one["memory"]["peak_device_bytes"] = 3 << 20
    table = perplexity.quality_table(result)
    assert table.heads[-1] == "peak MiB"
    assert {row[-1] for row in table.cells} == {"3"}


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
