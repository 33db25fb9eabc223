"""Latent attention: `python -m evals.latent`, what absorbing saves a decoded token, and what codecs do to latents.

A small DeepSeek-V3 that reads bytes is trained on the embedded text first, which takes a few minutes. Must never
compare times across rounds: all caches decode in turn, the model's own way among them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from torch.nn.functional import cross_entropy, kl_div
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, get_cosine_schedule_with_warmup

import kvplug
from evals import console, figure, runner, specs, texts
from evals.errors import InputError
from evals.models import Loaded, forward
from evals.report import Table
from evals.runner import Eval, Piece
from evals.throughput import Entrant, decode, filled, in_turn

ABSORBED = "absorbed "
SPEEDS = [specs.REFERENCE, "dense", *(f"{ABSORBED}{spec}" for spec in ("dense", "fp8", "int8", "int4"))]
CODECS = ["dense", "fp8", "int8", *(f"int{bits}:residual=0,sinks=0" for bits in (4, 3, 2)), "int4", "int3", "int2"]
TOKENS = [512, 1024, 4096]
CONTEXT, BATCH, ROWS, PROMPT = 256, 4, 32, 64
RATE, WEIGHT_DECAY, CLIP = 2e-3, 0.1, 1.0
NOTES = [
    "**decode** is the time of one decoded token as a ratio to the model's own attention with `DynamicCache`, in the "
    "same run and in turn: the median of the rounds, with the smallest and the largest. Below 1 is faster.",
    f"**perplexity** is per byte, of {ROWS} rows of {CONTEXT} bytes that were not trained on: {PROMPT} at once, then "
    "one at a time, so that all predictions that count have read back what was stored. **KL** is the divergence from "
    "the full cache's predictions, in nats a byte. Both are of the absorbed model.",
    "**bits** are those stored for each element of latent and rotated key at the end, with all scales; this model's "
    "full precision has 32. `residual=0,sinks=0` leaves no token as it was, the default keeps 36 of them.",
]


@dataclass(frozen=True)
class Load:
    """How long the model is trained, at which lengths decoding is timed, and how."""

    steps: int = 400
    tokens: tuple[int, ...] = tuple(TOKENS)
    rounds: int = 7
    forwards: int = 8

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("tokens", min(self.tokens)), ("rounds", self.rounds)):
            if value < 1:
                raise InputError(f"--{name}: got {value}, accepted is 1 or more")


@dataclass
class Latent(Eval):
    """A piece is one length, timed, or one codec; `rows` `[rows, CONTEXT]` are read for perplexity."""

    rows: torch.Tensor = None
    load: Load = field(default_factory=Load)
    _full: torch.Tensor | None = None

    name: ClassVar[str] = "latent"
    title: ClassVar[str] = "Latent attention: absorbed, and by codec"

    def protocol(self) -> dict:
        own = self.loaded.model.config
        widths = ("hidden_size", "num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_rope_head_dim")
        widths += ("qk_nope_head_dim", "v_head_dim")
        return asdict(self.load) | {name: getattr(own, name) for name in widths}

    def pieces(self) -> list[Piece]:
        clocked = len(SPEEDS) * (1 + self.load.rounds) * self.load.forwards
        timed = [Piece(f"decoding at {n:,}", clocked, ("speed", n), timed=True) for n in self.load.tokens]
        read = 1 + CONTEXT - PROMPT
        return [Piece(f"perplexity, {spec}", read, ("quality", spec)) for spec in CODECS] + timed

    def measure(self, piece: Piece, tick: Callable[[int], Any]) -> dict:
        kind, of = piece.of
        return self._speed(of, tick) if kind == "speed" else self._quality(of, tick)

    def _speed(self, tokens: int, tick: Callable[[int], Any]) -> dict:
        """Milliseconds of a token in each round, by cache, and how far its first prediction is from the reference's."""
        model, load = self.loaded.model, self.load
        ids = self.rows[:1]
        states = specs.build(specs.REFERENCE, model, capacity=CONTEXT)
        with torch.no_grad():
            forward(model, ids, states, logits_to_keep=1)
        tile, token = [(layer.keys, layer.values) for layer in states.layers], ids[:, -1:]
        entrants, named, wanted = [], {}, None
        for label in SPEEDS:
            spec = label.removeprefix(ABSORBED)
            entrants.append(Entrant(spec, filled(spec, model, tile, tokens, tokens + 1000)))
            named[id(entrants[-1])] = label
        for entrant in entrants:
            with absorbed(model, named[id(entrant)]), specs.routed(entrant.spec, model), torch.no_grad():
                predicted = forward(model, token, entrant.cache).logits[:, -1].log_softmax(-1)
            wanted = predicted if wanted is None else wanted
            entrant.kl = kl_div(predicted, wanted, log_target=True, reduction="batchmean").item()
        for turn in range(1 + load.rounds):
            for entrant in in_turn(entrants, turn):
                with absorbed(model, named[id(entrant)]):
                    seconds = decode(model, entrant, token, load.forwards)
                tick(load.forwards)
                if turn:
                    entrant.seconds.append(seconds)
        return {named[id(one)]: {"ms": [1000 * x for x in one.seconds], "kl": max(one.kl, 0.0)} for one in entrants}

    @torch.no_grad()
    def _quality(self, spec: str, tick: Callable[[int], Any]) -> dict:
        """Perplexity of the rows through a cache, and what it holds at the end."""
        if self._full is None and spec != "dense":
            self._full = self._read("dense", lambda n: None)[0]
        predicted, memory = self._read(spec, tick)
        if spec == "dense":
            self._full = predicted
        loss = cross_entropy(predicted[:, :-1].flatten(0, 1), self.rows[:, PROMPT + 1 :].flatten())
        kl = kl_div(predicted.flatten(0, 1), self._full.flatten(0, 1), log_target=True, reduction="batchmean")
        return {"perplexity": loss.exp().item(), "kl": max(kl.item(), 0.0), "bits": memory.bits_per_element}

    def _read(self, spec: str, tick: Callable[[int], Any]) -> tuple[torch.Tensor, kvplug.MemoryReport]:
        """Predictions after the prompt, log-probabilities `[rows, bytes, 256]`, and the cache's memory."""
        model, parts = self.loaded.model, []
        with absorbed(model, ABSORBED), specs.routed(spec, model):
            cache = specs.build(spec, model, capacity=CONTEXT)
            for piece in self.rows.split([PROMPT] + [1] * (CONTEXT - PROMPT), dim=1):
                parts.append(forward(model, piece, cache).logits.log_softmax(-1))
                tick(1)
        return torch.cat(parts[1:], dim=1), cache.memory()

    def results(self, records: dict[str, dict]) -> list[dict]:
        timed = [(piece.of[1], records[piece.key]) for piece in self.pieces() if piece.timed]
        entries = [
            {
                "spec": label,
                "decode": [
                    {"tokens": tokens, **ratios(found[label], found[specs.REFERENCE])} for tokens, found in timed
                ],
            }
            for label in SPEEDS
        ]
        read = [piece for piece in self.pieces() if not piece.timed]
        return entries + [{"spec": piece.of[1], "quality": records[piece.key]} for piece in read]

    def tables(self, result: dict) -> list[Table]:
        timed = [entry for entry in result["results"] if "decode" in entry]
        read = [entry for entry in result["results"] if "quality" in entry]
        heads = ["cache"]
        for one in timed[0]["decode"]:
            heads += [f"ms at {one['tokens']:,}", f"decode at {one['tokens']:,}"]
        cells = []
        for entry in timed:
            cells.append([entry["spec"]])
            for one in entry["decode"]:
                cells[-1] += [f"{one['ms']:.1f}", f"{one['ratio']:.2f} ({one['low']:.2f}–{one['high']:.2f})"]
        quality = [
            [e["spec"], f"{q['bits']:.2f}", f"{q['perplexity']:.4f}", f"{q['kl']:.5f}"]
            for e in read
            for q in [e["quality"]]
        ]
        return [
            Table("Time of a decoded token", heads, cells),
            Table("Quantised latents", ["cache", "bits", "perplexity", "KL"], quality),
        ]

    def notes(self, result: dict) -> list[str]:
        return NOTES

    def draw(self, result: dict, path: Path) -> None:
        draw(result, path)


@contextmanager
def absorbed(model, label: str) -> Iterator[None]:
    """Runs its body with the model absorbed, where `label` says so."""
    if not label.startswith(ABSORBED):
        yield
        return
    kvplug.absorb(model)
    try:
        yield
    finally:
        kvplug.unabsorb(model)


def ratios(own: dict, full: dict) -> dict:
    """The median time and its ratio to the reference's, round by round."""
    found = [a / b for a, b in zip(own["ms"], full["ms"], strict=True)]
    middle = statistics.median
    return {"ms": middle(own["ms"]), "ratio": middle(found), "low": min(found), "high": max(found), "kl": own["kl"]}


def draw(result: dict, path: Path) -> None:
    """Draws the ratios over the length, and perplexity over bits, to a PNG file."""
    drawn, (left, right) = figure.canvas(result["model"]["name"], columns=2, width=12)
    timed = [entry for entry in result["results"] if "decode" in entry]
    for index, entry in enumerate(timed):
        lengths, middle = ([one[name] for one in entry["decode"]] for name in ("tokens", "ratio"))
        left.plot(lengths, middle, label=figure.label_of(entry["spec"]), **figure.line_style(index))
    figure.counts(left, [one["tokens"] for one in timed[0]["decode"]])
    left.set_ylim(bottom=0)
    left.set_xlabel("tokens in the cache", fontsize=11)
    left.set_ylabel("time per output token, ratio (↓ faster)", fontsize=11)
    left.legend(frameon=False, fontsize=10)
    read = [entry for entry in result["results"] if "quality" in entry]
    whole = [entry for entry in read if "=" in entry["spec"] or "int" not in entry["spec"] or entry["spec"] == "int8"]
    points = sorted((entry["quality"]["bits"], entry["quality"]["perplexity"]) for entry in whole)
    right.plot(*zip(*points, strict=True), **figure.line_style(0))
    figure.counts(right, [2, 4, 8, 16, 32])
    right.set_xlabel("bits stored for an element of the latent", fontsize=11)
    right.set_ylabel("perplexity per byte (↓ better)", fontsize=11)
    figure.save(drawn, path)


def build(seed: int) -> DeepseekV3ForCausalLM:
    """A DeepSeek-V3 that reads bytes, with dense layers alone; the same weights for the same seed."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=96,
        kv_lora_rank=128,
        qk_rope_head_dim=32,
        qk_nope_head_dim=64,
        v_head_dim=64,
        first_k_dense_replace=4,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
    )
    return DeepseekV3ForCausalLM(config)


def split(content: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes to train on, `[bytes]`, and the rows to read, `[ROWS, CONTEXT]`, out of the last tenth; the language
    reference says some things twice, so each paragraph stays once."""
    paragraphs = {" ".join(paragraph.split()): paragraph for paragraph in content.split("\n\n")}
    data = torch.tensor(list("\n\n".join(paragraphs.values()).encode()))
    end = 9 * len(data) // 10
    return data[:end], data[end:].unfold(0, CONTEXT, (len(data) - end - CONTEXT) // (ROWS - 1))[:ROWS]


def train(model: DeepseekV3ForCausalLM, data: torch.Tensor, steps: int, seed: int) -> None:
    """Trains on windows of `data` at random, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    windows = data.unfold(0, CONTEXT, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    model.train()
    with console.progress(steps, "training", "step") as bar:
        for _ in range(steps):
            ids = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            schedule.step()
            bar.set_postfix(perplexity=f"{loss.exp().item():.2f}", refresh=False)
            bar.update()
    model.eval()


def main(
    steps: Annotated[int, typer.Option("--steps", help="Batches that the model is trained on.")] = Load.steps,
    tokens: Annotated[list[int], typer.Option("--tokens", help="Tokens in the cache; repeatable.")] = TOKENS,
    rounds: Annotated[int, typer.Option("--rounds", help="Turns that each cache gets.")] = Load.rounds,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Folder of the trained model: made, or read where it is there.")
    ] = None,
    seed: console.SeedOption = 0,
    out: console.OutOption = None,
) -> None:
    """Times absorbed latent attention against the model's own, and reads a text through quantised latents."""
    load = Load(steps, tuple(tokens), rounds)
    text = texts.read()
    training, rows = split(text.content)
    if keep is not None and keep.is_dir():
        model = DeepseekV3ForCausalLM.from_pretrained(keep, local_files_only=True).eval()
    else:
        model = build(seed)
        train(model, training, steps, seed)
        if keep is not None:
            model.save_pretrained(keep)
    loaded = Loaded(f"small DeepSeek-V3 over bytes, {steps} steps", model, None)
    told = {"source": text.source, "sha256": text.sha256, "tokens": len(training) + rows.numel(), "starts": []}
    runner.run(Latent(loaded, SPEEDS[1:] + CODECS, seed, told, rows=rows, load=load), out)


if __name__ == "__main__":
    console.run(main)
