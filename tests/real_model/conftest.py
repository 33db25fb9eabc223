"""The embedded model, loaded once for all tests here, on two threads: it is large enough to gain from them."""

import pytest
import torch

from evals.models import load


@pytest.fixture(scope="package")
def smollm2():
    """SmolLM2-135M-Instruct in fp32 and its tokenizer: `Loaded(name, model, tokenizer)`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield load(dtype="float32")
    torch.set_num_threads(threads)
