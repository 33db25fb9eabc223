"""Teacher-forced measurement: known text is fed through a cache in small steps and every prediction is compared.

The prompt goes in with one forward, so nothing of it is counted: only predictions whose attention read back what the
cache stored. Must never look ahead: the logits at position t are judged by token t + 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from transformers import Cache, PreTrainedModel

from evals.errors import InputError
from evals.models import forward


@dataclass(frozen=True)
class Protocol:
    """How a window of `length` tokens is fed: `prefill` tokens at once, then `step` tokens at a time."""

    prefill: int = 1024
    step: int = 16
    length: int = 1536

    def __post_init__(self) -> None:
        if self.prefill < 1:
            raise InputError(f"--prefill: got {self.prefill}, accepted is 1 or more")
        if self.step < 1:
            raise InputError(f"--step: got {self.step}, accepted is 1 or more")
        if self.length < self.prefill + 2:
            raise InputError(
                f"--length: got {self.length}, accepted is --prefill + 2 ({self.prefill + 2}) or more, "
                "so that there is a prediction to judge"
            )

    @property
    def fed(self) -> int:
        """Tokens that the cache has seen at the end: the window's last token is only ever a target."""
        return self.length - 1

    @property
    def predictions(self) -> int:
        """Predictions that are judged: one for each token that is fed after the prompt."""
        return self.fed - self.prefill


@dataclass(frozen=True)
class Scores:
    """One figure for each judged prediction, in order, on the CPU, in double precision.

    Attributes:
        nll: negative log likelihood of the text's own next token, nats.
        kl: Kullback-Leibler divergence of the reference's prediction from the cache's, KL(reference ‖ cache), nats.
        agree: 1 where the likeliest token is the reference's, else 0.
    """

    nll: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor

    @staticmethod
    def join(parts: "list[Scores]") -> "Scores":
        """The scores of several runs of predictions, one after the other."""
        return Scores(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(Scores)))

    def lists(self) -> dict[str, list[float]]:
        """The figures as lists by name."""
        return {f.name: getattr(self, f.name).tolist() for f in fields(Scores)}


@torch.no_grad()
def predictions(
    model: PreTrainedModel, ids: torch.Tensor, cache: Cache, protocol: Protocol, tick: Callable[[int], object]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Feeds `ids` `[1, length]` through `cache`; yields `(first, log_probs [tokens, vocab])` for each step.

    `log_probs[i]`, in float32, predicts the token at `first + i + 1`. `tick` is told the tokens that each forward fed.
    """
    # A cache that is made of a context may have seen the prompt.
    if cache.get_seq_length() < protocol.prefill:
        forward(model, ids[:, cache.get_seq_length() : protocol.prefill], cache, logits_to_keep=1)
    tick(protocol.prefill)
    for first in range(protocol.prefill, protocol.fed, protocol.step):
        chunk = ids[:, first : min(first + protocol.step, protocol.fed)]
        logits = forward(model, chunk, cache).logits[0]
        yield first, logits.float().log_softmax(dim=-1)
        tick(chunk.shape[1])


def reference(model, ids: torch.Tensor, cache: Cache, protocol: Protocol, tick=lambda tokens: None) -> torch.Tensor:
    """The reference's log probabilities for every judged prediction, `[predictions, vocab]`, float32."""
    kept = None
    for first, log_probs in predictions(model, ids, cache, protocol, tick):
        if kept is None:
            kept = log_probs.new_empty(protocol.predictions, log_probs.shape[-1])
        at = first - protocol.prefill
        kept[at : at + len(log_probs)] = log_probs
    return kept


def score(
    model: PreTrainedModel,
    ids: torch.Tensor,
    cache: Cache,
    protocol: Protocol,
    against: torch.Tensor,
    tick: Callable[[int], object] = lambda tokens: None,
) -> Scores:
    """Feeds `ids` `[1, length]` through `cache` and judges it against the log probabilities of `reference`."""
    parts = []
    for first, log_probs in predictions(model, ids, cache, protocol, tick):
        at = first - protocol.prefill
        parts.append(compare(log_probs, against[at : at + len(log_probs)], ids[0, first + 1 :][: len(log_probs)]))
    return Scores.join(parts)


def compare(log_probs: torch.Tensor, against: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Judges `log_probs` `[tokens, vocab]` by the `targets` `[tokens]` that follow and by the reference's."""
    nll = -log_probs.gather(1, targets[:, None])[:, 0]
    # What the reference rules out adds nothing, where the formula would give 0 × ∞. Rounding can leave a sum of tiny
    # differences just below zero, which no divergence is.
    terms = torch.nn.functional.kl_div(log_probs, against, reduction="none", log_target=True)
    kl = terms.masked_fill(against.isneginf(), 0).sum(dim=-1).clamp(min=0)
    agree = log_probs.argmax(dim=-1) == against.argmax(dim=-1)
    return Scores(*(figure.detach().double().cpu() for figure in (nll, kl, agree)))
