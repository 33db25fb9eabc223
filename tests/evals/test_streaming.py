"""The stream's losses against one plain forward, and what is judged and refused."""

import pytest
import torch

from evals import streaming
from evals.errors import InputError
from evals.streaming import AFRESH, Stream, Streaming


@pytest.fixture
def ids():
    return torch.randint(0, 256, (1, 71), generator=torch.Generator().manual_seed(4))


def losses_of_one_forward(tiny, ids):
    with torch.no_grad():
        log_probs = tiny.model(input_ids=ids[:, :-1], use_cache=False).logits[0].double().log_softmax(-1)
    return -log_probs.gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("start", [0, 30], ids=["one_by_one", "after_chunks"])
@pytest.mark.parametrize("spec", ["streaming:sinks=4,window=96", "window:window=100"])
def test_with_room_for_all_a_stream_is_one_forward(tiny, ids, spec, start):
    """Targets are shifted, and positions are those that were asked for: 1e-4 is rounding over other kernels."""
    stream = Stream(start=start, tokens=70 - start, every=7, chunk=11)
    work = Streaming(tiny, [spec], ids=ids, stream=stream, budget=8)
    records = {piece.key: work.measure(piece, lambda tokens: None) for piece in work.pieces()}
    afresh, streamed = work.results(records)
    assert (afresh["spec"], streamed["spec"]) == (AFRESH, spec)
    judged = stream.judged(8)
    expected = losses_of_one_forward(tiny, ids)[judged].mean()
    assert streamed["predictions"] == len(judged)
    assert abs(streamed["loss"] - expected) < 1e-4
    assert abs(losses_of_one_forward(tiny, ids[:, :-1])[[p - 1 for p in judged]].mean() - expected) > 1e-2
    assert streamed["loss_above_afresh"] == pytest.approx(streamed["loss"] - afresh["loss"])


def test_recomputing_sees_the_last_tokens_alone(tiny, ids):
    got = streaming.recomputed(tiny, ids, 8, [20, 33], lambda n: None)
    for loss, position in zip(got, [20, 33], strict=True):
        block = ids[:, position - 7 : position + 2]
        assert abs(loss - losses_of_one_forward(tiny, block)[-1]) < 1e-4


def test_positions_with_two_budgets_behind_them_are_judged():
    assert Stream(tokens=40, every=10).judged(8) == [16, 26, 36]
    assert Stream(start=30, tokens=20, every=10).judged(8) == [30, 40]


@pytest.mark.parametrize("name", ["tokens", "every", "chunk"])
def test_an_impossible_stream_is_named(name):
    with pytest.raises(InputError, match=f"--{name}: got 0"):
        Stream(**{name: 0})


def test_a_stream_shorter_than_two_budgets_is_refused(tiny, ids):
    with pytest.raises(InputError, match="--tokens: got 10"):
        Streaming(tiny, [], ids=ids, stream=Stream(tokens=10), budget=8)
