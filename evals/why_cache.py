"""Why there is a cache at all, for whoever meets it first: `python -m evals.why_cache`, one figure and one report.

One small model writes the same tokens with and without. Work is counted, bytes are held against the formula, time is
measured beside them. Must never fill the memory to find where it ends: that is computed.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

import kvplug
from evals import console, held, lesson, models, report, runner, specs
from evals.errors import InputError
from evals.lesson import BLOCK, NONE, told_bytes
from evals.models import Loaded, forward
from evals.runner import Eval, Piece
from kvplug import cli

SMALL = "small"
# Query heads share keys and values: each has its own (MHA), some share (GQA), all share (MQA).
HEADS, SHARED = 8, {"MHA": 8, "GQA": 2, "MQA": 1}
# Compressed caches whose limit is told beside full precision's, from their plan.
COMPRESSED = ("int8", "int4")
GENERATED, BATCHES = [128, 256, 512], [1, 2, 4, 8, 16, 32, 64]


@dataclass(frozen=True)
class Course:
    """What is done: a prompt of `prompt` tokens, then tokens up to each of `generated`; the other parts of the lesson
    start from a cache of `context` tokens, for `batches` rows at once, and ask when `memory` bytes are full.
    """

    prompt: int = 1
    generated: tuple[int, ...] = tuple(GENERATED)
    context: int = 512
    batches: tuple[int, ...] = tuple(BATCHES)
    memory: int = 128 * 2**20
    repeats: int = 8

    def __post_init__(self) -> None:
        for option, values in (("prompt", [self.prompt]), ("generated", self.generated), ("context", [self.context])):
            for value in values:
                if value < 1:
                    raise InputError(f"--{option}: got {value}, accepted is 1 or more")

    @property
    def positions(self) -> int:
        """The longest context that the model has to read."""
        return max(self.prompt + max(self.generated), self.context + self.repeats)


def small(kv_heads: int = SHARED["GQA"], seed: int = 0) -> LlamaForCausalLM:
    """A Llama of a few million random weights: its tokens mean nothing, the work is that of a trained one."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=8,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=16,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def attention_flops(query, key, value, *args, out_shape=None, **kwargs) -> int:
    """Multiplications and additions of attention over shapes `[batch, heads, tokens, head_dim]`, masked ones too."""
    batch, heads, queries, width = query
    return 2 * batch * heads * queries * key[2] * (width + value[-1])


def counter() -> FlopCounterMode:
    """Counts the FLOPs of all matrix products in its body, those inside the CPU's attention kernel as well."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={kernel: attention_flops})


@torch.no_grad()
def generate(model, spec: str, ids: torch.Tensor, tokens: int, after: Callable[[], Any]) -> tuple[list[int], Any]:
    """The likeliest `tokens` tokens after `ids` `[1, prompt]`, and the cache that they were read through, if any.

    Args:
        spec: a cache, or `"none"`: all tokens so far go through the model again for each new one.
        after: called after each token.
    """
    with specs.routed(spec if spec != NONE else specs.REFERENCE, model):
        cache = None if spec == NONE else specs.build(spec, model, capacity=ids.shape[1] + tokens)
        fed, found = ids, []
        for _ in range(tokens):
            if cache is None:
                logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
            else:
                logits = forward(model, fed, cache, logits_to_keep=1).logits
            fed = logits[:, -1:].argmax(-1)
            found.append(fed.item())  # waits for the device
            after()
            if cache is None:
                ids = torch.cat([ids, fed], dim=1)
    return found, cache


def formula(config, tokens: int, itemsize: int) -> int:
    """Bytes of keys and values in full precision: 2 x layers x kv_heads x head_dim x bytes x tokens."""
    config = config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * itemsize * tokens


def rows_that_fit(held_by: Callable[[int], int], room: int) -> int:
    """The largest batch whose cache, `held_by(batch)` bytes that grow with it, fits in `room`; 0 where none does."""
    low, high = 0, max(room // max(held_by(1), 1), 1)
    while held_by(high) <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held_by(middle) <= room else (low, middle)
    return low


@dataclass
class WhyCache(Eval):
    """The lesson; a piece is one way to generate, one batch, or one way to share heads."""

    course: Course = None

    name: ClassVar[str] = "why_cache"
    title: ClassVar[str] = "Why a KV cache"
    unit: ClassVar[str] = "step"

    @property
    def order(self) -> list[str]:
        return list(dict.fromkeys([NONE, specs.REFERENCE, *self.caches]))

    @property
    def variants(self) -> list[str]:
        """Ways of sharing heads that are held against the formula: a model from outside has its own only."""
        return list(SHARED) if self.loaded.name == SMALL else ["own"]

    def protocol(self) -> dict:
        course = self.course
        return {
            "prompt": course.prompt,
            "generated": list(course.generated),
            "context": course.context,
            "batches": list(course.batches),
            "memory": course.memory,
        }

    def pieces(self) -> list[Piece]:
        course, steps = self.course, max(self.course.generated)
        work = [Piece(f"generate, {spec}", 2 * steps, ("generate", spec), timed=True) for spec in self.order]
        rows = [Piece(f"batch {n}", course.repeats, ("batch", n), timed=True) for n in course.batches]
        costs = Piece("prefill and decode", 2 * course.repeats, ("costs",), timed=True)
        return [*work, costs, *rows, *(Piece(f"bytes, {kind}", 1, ("bytes", kind)) for kind in self.variants)]

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        kind, *of = piece.of
        return getattr(self, f"measure_{kind}")(*of, tick)

    def ids(self, tokens: int) -> torch.Tensor:
        """A prompt of random tokens, the same for all, `[1, tokens]`."""
        made = torch.Generator().manual_seed(self.seed)
        vocabulary = self.loaded.model.config.get_text_config(decoder=True).vocab_size
        return torch.randint(0, vocabulary, (1, tokens), generator=made).to(self.loaded.model.device)

    def measure_generate(self, spec: str, tick) -> dict:
        """Tokens, seconds and FLOPs step by step: one run for the clock, one for the counter, which takes time."""
        model, ids, steps = self.loaded.model, self.ids(self.course.prompt), max(self.course.generated)
        generate(model, spec, ids, 4, lambda: None)
        clock, flops = [time.perf_counter()], [0]
        tokens, cache = generate(model, spec, ids, steps, lambda: (clock.append(time.perf_counter()), tick(1)))
        memory = None if cache is None else held.counted(cache, model, self.course.prompt + steps - 1)
        del cache
        with counter() as counted:
            generate(model, spec, ids, steps, lambda: (flops.append(counted.get_total_flops()), tick(1)))
        seconds = [later - sooner for sooner, later in itertools.pairwise(clock)]
        blocks = [(first, seconds[first : first + BLOCK]) for first in range(0, steps, BLOCK)]
        return {
            "tokens": tokens,
            "generated": [
                {
                    "tokens": n,
                    "flops": flops[n],
                    "seconds": clock[n] - clock[0],
                    "last_ms": typical(seconds[:n][-BLOCK:]),
                }
                for n in self.course.generated
            ],
            "latency": [
                {"first": first + 1, "last": first + len(block), "ms": typical(block)} for first, block in blocks
            ],
            "memory": memory,
        }

    @torch.no_grad()
    def measure_costs(self, tick) -> dict:
        """Time, FLOPs and bytes read for a token: of a prompt at once, and of one token after it."""
        model, ids = self.loaded.model, self.ids(self.course.context)
        weights = weight_bytes(model)
        found = {"tokens": self.course.context}
        for _ in range(2):  # the first goes unheeded: it wakes the machine up
            prefill = []
            for _ in range(self.course.repeats // 2):
                cache = specs.build(specs.REFERENCE, model, capacity=self.course.positions)
                prefill.append(clocked(model, ids, cache))
                tick(1)
            before = held.held_bytes(cache, outside=model)
            decode = [clocked(model, ids[:, :1], cache) for _ in range(self.course.repeats)]
            tick(self.course.repeats // 2)
        for name, seconds, fed, read in (
            ("prefill", prefill, ids, weights),
            ("decode", decode, ids[:, :1], weights + before),
        ):
            cache = specs.build(specs.REFERENCE, model, capacity=self.course.positions)
            if name == "decode":
                forward(model, ids, cache, logits_to_keep=1)
            with counter() as counted:
                forward(model, fed, cache, logits_to_keep=1)
            found[name] = {
                "ms_per_token": typical(seconds) / fed.shape[1],
                "flops_per_token": counted.get_total_flops() / fed.shape[1],
                "bytes_per_token": read / fed.shape[1],
            }
        return found

    @torch.no_grad()
    def measure_batch(self, rows: int, tick) -> dict:
        """Tokens a second of so many rows that decode together, each with a full context behind it."""
        model, ids = self.loaded.model, self.ids(self.course.context)
        cache = specs.build(specs.REFERENCE, model, capacity=self.course.positions)
        forward(model, ids, cache, logits_to_keep=1)
        cache.batch_repeat_interleave(rows)
        token = ids[:, :1].expand(rows, 1)
        clocked(model, token, cache)
        seconds = []
        for _ in range(self.course.repeats - 1):
            seconds.append(clocked(model, token, cache))
            tick(1)
        tick(1)
        return {"rows": rows, "tokens_per_second": 1000 * rows / typical(seconds)}

    @torch.no_grad()
    def measure_bytes(self, kind: str, tick) -> dict:
        """Bytes that a cache holds after the context, and what the formula says."""
        model = (
            self.loaded.model
            if kind == "own"
            else small(SHARED[kind], self.seed).to(self.loaded.model.device, self.loaded.model.dtype)
        )
        cache = specs.build(specs.REFERENCE, model, capacity=self.course.context)
        forward(model, self.ids(self.course.context), cache, logits_to_keep=1)
        tick(1)
        itemsize, tokens = model.dtype.itemsize, self.course.context
        room = self.course.memory - weight_bytes(model)
        return {
            "kind": kind,
            "kv_heads": getattr(model.config.get_text_config(decoder=True), "num_key_value_heads", None),
            "tokens": tokens,
            "formula_bytes": formula(model.config, tokens, itemsize),
            "held_bytes": held.held_bytes(cache, outside=model),
            "rows": rows_that_fit(lambda rows: rows * formula(model.config, tokens, itemsize), room),
        }

    def results(self, records: dict[str, dict]) -> list[dict]:
        entries = []
        for spec in self.order:
            record = records[f"generate, {spec}"]
            same = first_difference(record["tokens"], records[f"generate, {NONE}"]["tokens"])
            entries.append({"spec": spec, **record, "differs_at": same})
        full = entries[1]
        full["costs"] = records["prefill and decode"]
        full["batches"] = [records[f"batch {n}"] for n in self.course.batches]
        full["bytes"] = [records[f"bytes, {kind}"] for kind in self.variants]
        full["limits"] = self.limits()
        return entries

    def limits(self) -> list[dict]:
        """At which batch the memory is full, weights and all, in full precision and as kvplug plans it."""
        model, tokens = self.loaded.model, self.course.context
        room = self.course.memory - weight_bytes(model)
        held_by = {specs.REFERENCE: lambda rows: rows * formula(model.config, tokens, model.dtype.itemsize)}
        for spec in dict.fromkeys([*COMPRESSED, *(spec for spec in self.caches if not specs.is_baseline(spec))]):
            held_by[spec] = lambda rows, spec=spec: (
                kvplug.plan(model.config, spec, tokens, rows, dtype=model.dtype).total
            )
        found = []
        for spec, count in held_by.items():
            try:
                found.append({"spec": spec, "row_bytes": count(1), "rows": rows_that_fit(count, room)})
            except ValueError:
                continue  # a model whose sizes its config doesn't tell has no plan
        return found

    def tables(self, result: dict) -> list[report.Table]:
        return lesson.tables(result)

    def notes(self, result: dict) -> list[str]:
        return lesson.notes(result)

    def draw(self, result: dict, path: Path) -> None:
        lesson.draw(result, path)


@torch.no_grad()
def clocked(model, ids: torch.Tensor, cache) -> float:
    """Seconds of one forward, until its likeliest tokens are known."""
    start = time.perf_counter()
    forward(model, ids, cache, logits_to_keep=1).logits.argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - start


def typical(seconds: list[float]) -> float:
    """Milliseconds, the median: one that another program held up doesn't count."""
    return 1000 * statistics.median(seconds)


def weight_bytes(model) -> int:
    """Bytes of all weights."""
    return sum(size for size in held.storages(list(model.parameters())).values())


def first_difference(one: list[int], other: list[int]) -> int | None:
    """The first place, counted from 1, where two lists of one length differ; None where they are the same."""
    return next((i + 1 for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)


def read_bytes(told: str) -> int:
    """Bytes of a size such as `1GiB`, as `kvplug plan` reads it."""
    try:
        return cli.read_memory(told)
    except cli.InputError as error:
        raise InputError(str(error)) from error


def load(model: str, course: Course, device: str, dtype: str, seed: int) -> Loaded:
    """The small model of that seed, or one from outside that can read as many tokens as the lesson takes."""
    if model == SMALL:
        if dtype not in ("auto", *models.DTYPES):
            raise InputError(f"--dtype: got '{dtype}', accepted are auto, {', '.join(models.DTYPES)}")
        if device == "auto":
            raise InputError("--device: got 'auto', accepted for the small model are cpu, cuda, cuda:N, mps")
        made = small(seed=seed).to(models.check_device(device), models.DTYPES.get(dtype, torch.float32))
        loaded = Loaded(SMALL, made, None)
    else:
        loaded = models.load(model, device=device, dtype=dtype)
    if loaded.max_positions is not None and course.positions > loaded.max_positions:
        raise InputError(
            f"--generated, --context: they need {course.positions:,} positions, accepted is up to the model's "
            f"{loaded.max_positions:,}"
        )
    if course.memory <= weight_bytes(loaded.model):
        raise InputError(
            f"--memory: got {told_bytes(course.memory)}, accepted is more than the weights' "
            f"{told_bytes(weight_bytes(loaded.model))}"
        )
    return loaded


def main(
    cache: console.CacheOption = [],  # noqa: B006
    model: Annotated[
        str, typer.Option("--model", help="`small` (a random Llama from the seed), a local folder, or a hub name.")
    ] = SMALL,
    prompt: Annotated[int, typer.Option("--prompt", help="Tokens to start from.")] = Course.prompt,
    generated: Annotated[list[int], typer.Option("--generated", help="Tokens generated; repeatable.")] = GENERATED,
    context: Annotated[int, typer.Option("--context", help="Tokens of a row in the other parts.")] = Course.context,
    batch: Annotated[
        list[int], typer.Option("--batch", min=1, help="Rows that decode together; repeatable.")
    ] = BATCHES,
    memory: Annotated[str, typer.Option("--memory", help="What weights and caches may take, as `1GiB`.")] = "128MiB",
    device: console.DeviceOption = "cpu",
    dtype: console.DtypeOption = "auto",
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """What a KV cache saves, what it costs, and where its memory ends; **--cache** adds runs with further caches."""
    ordered = tuple(sorted(set(generated))), tuple(sorted(set(batch)))
    course = Course(prompt, ordered[0], context, ordered[1], read_bytes(memory))
    loaded = load(model, course, device, dtype, seed)
    runner.run(WhyCache(loaded, specs.check(cache, loaded.model), seed, None, course), out)


if __name__ == "__main__":
    console.run(main)
