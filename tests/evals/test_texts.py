"""Text sources: every accepted kind reads the same words, and what holds none is named in one line."""

import json

import pandas
import pytest
import torch

from evals import texts
from evals.errors import InputError

DOCUMENTS = ["First words.\nA second line.", "And another document, with an umlaut: ü."]
JOINED = "\n\n".join(DOCUMENTS)


@pytest.fixture(autouse=True)
def _own_caches(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))


def write(path, rows):
    if path.suffix == ".txt":
        path.write_text("\n\n".join(row["text"] for row in rows), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    else:
        pandas.DataFrame(rows).to_parquet(path)
    return path


@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".json", ".parquet"])
def test_every_format_reads_the_same_words(tmp_path, ending):
    path = write(tmp_path / f"text{ending}", [{"text": document, "n": 1} for document in DOCUMENTS])
    assert texts.read(str(path)).content == JOINED


def test_a_folder_reads_its_files_in_order(tmp_path):
    for name, document in zip(["b.txt", "a.txt"], reversed(DOCUMENTS), strict=True):
        (tmp_path / name).write_text(document, encoding="utf-8")
    assert texts.read(str(tmp_path)).content == JOINED


def test_the_only_column_of_strings_is_the_text(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"body": "words", "n": 1}])
    assert texts.read(str(path)).content == "words"


def test_a_column_can_be_named(tmp_path):
    path = write(tmp_path / "t.jsonl", [{"text": "no", "body": "yes"}])
    assert texts.read(str(path), column="body").content == "yes"


@pytest.mark.parametrize(
    ("rows", "column", "named"),
    [
        ([{"one": "x", "two": "y"}], None, "--column: say which column"),
        ([{"text": "x"}], "body", "has no column 'body'; it has text"),
        ([{"text": "x", "n": 1}], "n", "holds int, not text"),
        ([{"text": " \n"}], None, "holds no text"),
    ],
    ids=["two columns", "no such column", "not text", "blank"],
)
def test_what_holds_no_text_says_so(tmp_path, rows, column, named):
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(InputError, match=named):
        texts.read(str(path), column=column)


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl", "t.parquet", "t.json"])
def test_an_empty_file_says_so(tmp_path, name):
    (tmp_path / name).write_text("")
    with pytest.raises(InputError, match="holds no text"):
        texts.read(str(tmp_path / name))


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder / "missing.txt",
        lambda folder: folder / "nowhere" / "at" / "all",
        lambda folder: write(folder / "t.txt", [{"text": "x"}]).rename(folder / "t.docx"),
        lambda folder: folder,
    ],
    ids=["missing file", "missing folder", "unknown ending", "empty folder"],
)
def test_what_cannot_be_read_is_named_in_one_line(tmp_path, make):
    with pytest.raises(InputError) as raised:
        texts.read(str(make(tmp_path)))
    assert str(raised.value).startswith("--dataset: ")
    assert "\n" not in str(raised.value)


def test_a_broken_file_is_named_in_one_line(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "fine"}\n{"text": ')
    with pytest.raises(InputError, match=r"^--dataset: can't read"):
        texts.read(str(tmp_path / "t.jsonl"))


def test_the_embedded_text_is_the_same_every_time():
    assert texts.read().sha256 == texts.read().sha256
    assert len(texts.read().content) > 100_000


def test_windows_are_spread_evenly_and_never_overlap(tiny):
    text = texts.Text("numbers", "".join(chr(32 + i % 90) for i in range(1000)))
    cut = texts.windows(tiny.tokenizer, text, length=100, count=3)
    whole = torch.tensor(tiny.tokenizer(text.content).input_ids)
    assert cut.total == 1000
    assert all(torch.equal(ids, whole[start : start + 100]) for ids, start in zip(cut.ids, cut.starts, strict=True))
    # Each in the middle of a third: 1000/6, 3000/6 and 5000/6 are their centres.
    assert cut.starts == (116, 450, 783)


def test_a_text_that_just_fits_is_cut_without_overlap(tiny):
    cut = texts.windows(tiny.tokenizer, texts.Text("x", "x" * 300), length=100, count=3)
    assert cut.starts == (0, 100, 200)


def test_a_text_too_short_says_how_short(tiny):
    with pytest.raises(InputError, match="has 299 tokens, too short for 3 windows of 100"):
        texts.windows(tiny.tokenizer, texts.Text("x", "x" * 299), length=100, count=3)


def test_windows_open_as_the_tokenizer_opens_a_text():
    class Opening:
        bos_token_id = 7

        def __call__(self, text, add_special_tokens=True, verbose=True):
            ids = [7] * add_special_tokens + [ord(letter) for letter in text]
            return type("Encoding", (), {"input_ids": ids})()

    cut = texts.windows(Opening(), texts.Text("x", "abcdef"), length=3, count=2)
    assert cut.ids.tolist() == [[7, ord("b"), ord("c")], [7, ord("e"), ord("f")]]
