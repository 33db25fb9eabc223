"""The embedded model, loaded once for all tests here. One token at a time it gains nothing from a second thread."""

import pytest

from evals.models import load


@pytest.fixture(scope="package")
def smollm2():
    """SmolLM2-135M-Instruct in fp32 and its tokenizer: `Loaded(name, model, tokenizer)`."""
    return load(dtype="float32")
