"""The metric modules: load from their folder as anyone would load them, and give what is worked out by hand here."""

import math
import random
from pathlib import Path

import evaluate
import pytest

from evals import metrics

FOLDER = Path(metrics.__file__).parent
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir() and not path.name.startswith("_"))


@pytest.mark.parametrize("name", NAMES)
def test_a_module_loads_from_its_folder(name):
    module = evaluate.load(str(FOLDER / name))
    assert module.description and "Returns:" in module.inputs_description


def test_teacher_forced():
    told = metrics.load("teacher_forced").compute(nll=[1.0, 3.0], kl=[0.0, 0.5], agree=[1, 0])
    assert told == {
        "perplexity": pytest.approx(math.exp(2.0)),
        "kl": 0.25,
        "kl_max": 0.5,
        "top1_agreement": 0.5,
        "predictions": 2,
    }


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("12345", True),
        ("It is 12345.", True),
        ("the key\n12345\nand", True),
        ("123456", False),
        ("912345", False),
        ("x12345", False),
        ("123456 or 12345", True),
        ("54321", False),
        ("", False),
    ],
)
def test_an_answer_counts_where_it_stands_by_itself(answer, found):
    assert metrics.load("recall").compute(predictions=[answer], references=["12345"])["recall"] == found


def test_the_interval_is_wilsons():
    """18 of 20: a textbook value, and the ends solve the quadratic that defines the interval."""
    told = metrics.load("recall").compute(predictions=["7"] * 18 + ["no"] * 2, references=["7"] * 20)
    assert (told["recall"], told["n"]) == (0.9, 20)
    assert (told["low"], told["high"]) == (pytest.approx(0.699, abs=1e-3), pytest.approx(0.972, abs=1e-3))
    for end in (told["low"], told["high"]):
        assert abs(0.9 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 20), abs=1e-6)


@pytest.mark.parametrize(("hits", "low", "high"), [(0, 0.0, 0.2775), (10, 0.7225, 1.0)], ids=["none", "all"])
def test_the_interval_stays_within_zero_and_one(hits, low, high):
    answers = ["7"] * hits + ["no"] * (10 - hits)
    told = metrics.load("recall").compute(predictions=answers, references=["7"] * 10)
    assert (told["low"], told["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def distance(one, other):
    """Levenshtein's distance from its definition."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (a != b)))
    return row[-1]


def test_token_agreement_against_the_definition():
    rng = random.Random(5)
    ones = [[rng.randrange(4) for _ in range(rng.randrange(1, 12))] for _ in range(30)]
    others = [[rng.randrange(4) for _ in range(rng.randrange(1, 12))] for _ in range(30)]
    told = metrics.load("token_agreement").compute(predictions=ones, references=others)
    shares = [distance(a, b) / max(len(a), len(b)) for a, b in zip(ones, others, strict=True)]
    assert told["edit_distance"] == pytest.approx(sum(shares) / 30)
    assert told["identical"] == sum(a == b for a, b in zip(ones, others, strict=True)) / 30


def test_where_tokens_part():
    told = metrics.load("token_agreement").compute(
        predictions=[[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 3, 4]], references=[[1, 2, 9, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    )
    assert told["first_divergence"] == 2  # of 2, 0 and 4
    assert told["identical"] == pytest.approx(1 / 3)
    assert told["n"] == 3
