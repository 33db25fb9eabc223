"""Perplexity, divergence and agreement of predictions along a known text, from one figure for each prediction."""

import math

import datasets
import evaluate

DESCRIPTION = """Summarises teacher-forced predictions: exp of the mean negative log likelihood of the text's own
tokens, mean Kullback-Leibler divergence from a reference's predictions, how often the likeliest token is the same."""
INPUTS = """
Args:
    nll: negative log likelihood of the token that follows, in nats, for each prediction.
    kl: KL(reference ‖ this), in nats, for each prediction.
    agree: 1 where the likeliest token is the reference's, else 0.
Returns:
    perplexity, kl (mean), kl_max, top1_agreement (share), predictions (how many).
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, INPUTS)
class TeacherForced(evaluate.Metric):
    def _info(self):
        number = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=INPUTS,
            features=datasets.Features({"nll": number, "kl": number, "agree": number}),
        )

    def _compute(self, nll, kl, agree):
        count = len(nll)
        return {
            "perplexity": math.exp(math.fsum(nll) / count),
            "kl": math.fsum(kl) / count,
            "kl_max": max(kl),
            "top1_agreement": math.fsum(agree) / count,
            "predictions": count,
        }
