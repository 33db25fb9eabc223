"""The metrics of the evals, as modules of the `evaluate` library: each loads from its folder, without a network.

Must never be needed while a model runs: metrics see the figures that were measured, not tensors.
"""

import functools
import uuid
from pathlib import Path

import evaluate


@functools.cache
def load(name: str) -> evaluate.EvaluationModule:
    """The metric in the folder `name`, as `evaluate.load` gives it to anyone who passes the folder's path."""
    # An id of its own: processes that run at once would otherwise share a file and wait for each other.
    return evaluate.load(str(Path(__file__).parent / name), experiment_id=uuid.uuid4().hex, keep_in_memory=True)
