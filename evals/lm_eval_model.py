"""lm-evaluation-harness through a cache: `python -m evals.lm_eval_model --model kvplug --model_args …,cache=int4`.

The harness scores a text with one forward, which reads nothing back. Must never do that: the context is stored first,
and what is scored after it reads back what the cache kept.
"""

import sys
from collections import defaultdict
from dataclasses import fields

import torch
from torch.nn.functional import log_softmax
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

from evals import models, specs
from evals.errors import InputError, first_line
from kvplug import compat
from kvplug.policies import POLICIES

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError("evals.lm_eval_model needs lm-evaluation-harness: pip install 'kvplug[lm-eval]'") from error

# The harness cuts its model arguments at commas, so that a spec which keeps its own arrives in pieces; these are the
# names that such a piece would have.
SPEC_ARGUMENTS = {"keys", "values"} | {field.name for policy in POLICIES.values() for field in fields(policy)}


@register_model("kvplug")
class CachedLM(HFLM):
    """A causal language model whose every scored token and every generated one goes through a fresh cache.

    Args:
        pretrained: `"smollm2"` for the embedded SmolLM2-135M-Instruct, a local folder, a hub name, or a loaded model.
        cache: a kvplug spec, or `transformers:NAME`. `/` stands for the comma, at which the harness cuts its arguments:
            `streaming:sinks=4/window=508+int4`.
        step: tokens that are fed at a time after the context. 1 is what decoding does. More is faster and flatters the
            cache: a token then sees those of its own step as they are, and what they evict only after them.
        device: by default `cuda` where there is one, else `cpu`.
        others: all that the harness' own `hf` model takes (`dtype`, `max_length`, `revision`, `peft`, …).

    Raises:
        InputError: the spec has a typo or doesn't fit the model, `step` is not valid, or the model can't be loaded.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        cache: str | None = None,
        step: int = 1,
        device: str | None = None,
        **others,
    ) -> None:
        if cache is None:
            raise InputError("--model_args: cache is missing; accepted is a spec, such as cache=dense or cache=int4")
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise InputError(f"--model_args: step: got {step!r}, accepted is a whole number of 1 or more")
        torn = [f"{name}={value}" for name, value in others.items() if name in SPEC_ARGUMENTS]
        if torn:
            raise InputError(
                f"--model_args: {','.join(torn)} belongs to the cache; write / for a comma within a spec: "
                f"cache={'/'.join([str(cache), *torn])}"
            )
        source = str(models.embedded_model()) if pretrained == models.EMBEDDED else pretrained
        try:
            super().__init__(source, device=device or ("cuda" if torch.cuda.is_available() else "cpu"), **others)
        except OSError as error:
            raise InputError(f"--model_args: pretrained: can't load '{pretrained}': {first_line(error)}") from error
        if self.backend != "causal":
            raise InputError(f"--model_args: pretrained: '{pretrained}' is {self.backend}; accepted is a causal model")
        self.spec = str(cache).replace("/", ",")
        self.step = step
        try:
            specs.check([self.spec], self.model)
        except InputError as error:
            raise InputError(f"--model_args: {str(error).removeprefix('--')}") from error

    def get_model_info(self) -> dict:
        """What the harness records of the model, with the cache that it ran through."""
        return {**super().get_model_info(), "kvplug_cache": self.spec, "kvplug_step": self.step}

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """For each `(key, context, continuation)`, its log likelihood in nats and whether greedy decoding says it too.

        One request at a time, whatever the batch size. Requests that differ in their last token alone are fed once, as
        they feed the same: an answer's last token is never fed.
        """
        alike = defaultdict(list)
        for i, (_, context, continuation) in enumerate(requests):
            alike[tuple(context), tuple(continuation[:-1])].append(i)
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        hidden = disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=hidden, desc="Running loglikelihood requests") as bar:
            for (context, _), members in alike.items():
                scored = self._score(list(context), [requests[i][2] for i in members])
                for i, answer in zip(members, scored, strict=True):
                    answers[i] = answer
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], answer)
                bar.update(len(members))
        return answers

    @torch.no_grad()
    def _score(self, context: list[int], continuations: list[list[int]]) -> list[tuple[float, bool]]:
        """Scores continuations of `context` that differ in their last token at most.

        All but the context's last token is stored by one forward. That token and the continuation's follow `step` at a
        time, so that each prediction, the first included, reads back what was stored.
        """
        targets = torch.tensor(continuations, device=self.device)  # [continuations, tokens]
        # As the harness does where a request is too long: the context loses its beginning.
        context = context[max(0, len(context) + targets.shape[1] - self.max_length - 1) :]
        if not context:
            raise ValueError(f"a continuation of {targets.shape[1]} tokens; accepted are {self.max_length} at most")
        fed = torch.tensor([context + continuations[0][:-1]], device=self.device)
        held, length = len(context) - 1, fed.shape[1]
        total = torch.zeros(len(continuations), dtype=torch.float64)
        greedy = torch.ones(len(continuations), dtype=torch.bool)
        with specs.routed(self.spec, self.model), self._autocast():
            cache = specs.build(self.spec, self.model, capacity=length)
            if held:
                models.forward(self.model, fed[:, :held], cache, logits_to_keep=1)
            for first in range(held, length, self.step):
                chunk = fed[:, first : first + self.step]
                logits = models.forward(self.model, chunk, cache).logits[0]
                log_probs = log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
                wanted = targets[:, first - held :][:, : len(log_probs)].T  # [tokens, continuations]
                total += log_probs.gather(1, wanted).double().sum(dim=0).cpu()
                greedy &= (log_probs.argmax(dim=-1, keepdim=True) == wanted).all(dim=0).cpu()
            self._must_have_seen(cache, length)
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **arguments) -> torch.Tensor:
        """`[batch, tokens]` that follow `context` `[batch, tokens]`, padded on the left, through one cache."""
        with specs.routed(self.spec, self.model):
            cache = specs.build(self.spec, self.model, capacity=max_length)
            made = super()._model_generate(
                context, max_length, stop, **{compat.cache_argument(self.model): cache}, **arguments
            )
            # The last token that was generated is never fed.
            self._must_have_seen(cache, made.shape[1] - 1)
        return made

    def _must_have_seen(self, cache: Cache, tokens: int) -> None:
        """A model that leaves the cache alone would score as if it were lossless."""
        seen = int(cache.get_seq_length())
        if seen < tokens:
            raise RuntimeError(f"{type(self.model).__name__} fed {tokens} tokens and its cache saw {seen} of them")

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)


def main() -> None:
    """The harness' own command line, which knows `--model kvplug` here; what can't be done is one line, exit code 2."""
    try:
        cli_evaluate()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
