"""Codecs on whatever numbers hypothesis comes up with: finite, within the bound, and the same alone as in company."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.codecs.cases import CODECS, DTYPES, LOW_BIT, assert_within, fits, round_trip

# Magnitudes that fp16 holds as normal numbers, so that the input itself is what was meant.
NUMBERS = st.floats(-60000, 60000, allow_nan=False, width=32)
SMALL = st.floats(-1, 1, allow_nan=False, width=32).map(lambda x: x * 1e-3)


@st.composite
def blocks(draw):
    dim, tokens = draw(st.sampled_from([1, 2, 4, 7, 16, 24, 64])), draw(st.sampled_from([1, 2, 6]))
    numbers = draw(st.sampled_from([NUMBERS, SMALL]))
    few = draw(st.lists(numbers, min_size=1, max_size=6))
    order = draw(st.lists(st.integers(0, len(few) - 1), min_size=tokens * dim, max_size=tokens * dim))
    return torch.tensor([few[i] for i in order]).reshape(1, 1, tokens, dim).to(draw(st.sampled_from(DTYPES)))


@pytest.mark.parametrize("name", LOW_BIT)
@given(x=blocks())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_within_the_bound(name, x):
    assume(fits(name, x.shape[-1]))
    assert_within(name, x, round_trip(name, x))


@pytest.mark.parametrize("name", list(CODECS))
@given(x=blocks())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_heads_and_rows_do_not_mix(name, x):
    assume(fits(name, x.shape[-1]))
    other, empty = torch.flip(x, (-1,)) * 3 + 1, torch.zeros_like(x)
    in_company = round_trip(name, _corners(x, other))
    # In a batch of the same shape: a matrix product may round differently where it has another number of rows.
    alone = round_trip(name, _corners(x, empty))
    for row, head in ((0, 0), (1, 1)):
        assert torch.equal(in_company[row, head], alone[row, head])


def _corners(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Two rows of two heads: x in the first head of the first row and the second of the second, else `other`."""
    return torch.cat([torch.cat([x, other], 1), torch.cat([other, x], 1)], 0)
