"""What every test shares: one thread, no network, and the tiny models that the contracts are proved on.

Fixtures hand out fresh models: a cache changes its model's attention implementation, and no test may see another's.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before transformers is imported: no test may reach for the network

import pytest
import torch

from tests import models

# Tiny tensors gain nothing from a second thread, and waiting for one costs tenfold where the machine is busy.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def model():
    """The two-layer Llama of `tests.models.tiny_llama`, fresh."""
    return models.tiny_llama()


@pytest.fixture
def one_layer():
    """The same with one layer, where a fresh forward over the kept tokens is an oracle."""
    return models.tiny_llama(num_hidden_layers=1)
