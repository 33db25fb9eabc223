"""Share of answers that were found, with its confidence interval."""

import math

import datasets
import evaluate

DESCRIPTION = """Share of predictions that contain the reference as a word of its own, with the 95% Wilson score
interval (Wilson, "Probable inference, the law of succession, and statistical inference", 1927)."""
INPUTS = """
Args:
    predictions: what the model wrote, a string each.
    references: what it should have found, a string each.
Returns:
    recall, n, and the interval's ends low and high.
"""
Z = 1.959963984540054


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class Recall(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references):
        n = len(predictions)
        hits = sum(_contains(told, wanted) for told, wanted in zip(predictions, references, strict=True))
        share = hits / n
        middle = (share + Z * Z / (2 * n)) / (1 + Z * Z / n)
        half = Z / (1 + Z * Z / n) * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
        return {"recall": share, "n": n, "low": max(middle - half, 0.0), "high": min(middle + half, 1.0)}


def _contains(told, wanted):
    """Whether `wanted` stands in `told` with no letter or digit right before or after it."""
    start = told.find(wanted)
    while start >= 0:
        around = told[max(start - 1, 0) : start] + told[start + len(wanted) : start + len(wanted) + 1]
        if not any(character.isalnum() for character in around):
            return True
        start = told.find(wanted, start + 1)
    return False
