"""How far freely written token sequences follow those of a reference."""

import statistics

import datasets
import evaluate
from rapidfuzz.distance import Levenshtein

DESCRIPTION = """Compares generated token ids with a reference's: where they part for the first time, and how many
insertions, deletions and substitutions lie between them (Levenshtein, 1966), as a share of the longer one."""
INPUTS = """
Args:
    predictions: token ids that were generated, a list for each prompt.
    references: the reference's token ids for the same prompts.
Returns:
    identical (share of equal sequences), first_divergence (median number of tokens before the first difference, the
    length where there is none), edit_distance (mean, 0 to 1), n.
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class TokenAgreement(evaluate.Metric):
    def _info(self):
        ids = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"predictions": ids, "references": ids}),
        )

    def _compute(self, predictions, references):
        pairs = list(zip(predictions, references, strict=True))
        return {
            "identical": sum(one == other for one, other in pairs) / len(pairs),
            "first_divergence": float(statistics.median(_common(one, other) for one, other in pairs)),
            "edit_distance": statistics.fmean(Levenshtein.normalized_distance(one, other) for one, other in pairs),
            "n": len(pairs),
        }


def _common(one, other):
    """Tokens before the first difference."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
