"""What tells one model from another, as far as its keys and values depend on it.

Must never read more than a few numbers of each weight, and never keep a reference to the model.
"""

from __future__ import annotations

import functools
import hashlib
import json

import torch
from transformers import PreTrainedConfig

from kvplug import compat

# Numbers of each weight that are looked at: training or an adapter changes nearly all of them.
LOOKED_AT = 16
# Settings that no key or value depends on, beside those that every config has.
WITHOUT_EFFECT = ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range", "pretraining_tp")

Fingerprint = dict[str, object]


def fingerprint(model_or_config: object) -> Fingerprint:
    """What JSON can hold of a model: "config", its settings by name; "dtype"; "weights", a digest.

    The latter two are None for a config, and the digest where not all weights are at hand (on the meta device, sharded,
    or written in a form of their own).
    """
    if isinstance(model_or_config, PreTrainedConfig):
        return {"config": _settings(model_or_config), "dtype": None, "weights": None}
    dtype = getattr(model_or_config, "dtype", None)
    return {
        "config": _settings(model_or_config.config),
        "dtype": dtype and str(dtype).removeprefix("torch."),
        "weights": _weights(model_or_config),
    }


def differences(saved: Fingerprint, found: Fingerprint) -> list[str]:
    """In words, where two fingerprints differ; what one of them lacks is not compared."""
    ours, theirs = saved["config"], found["config"]
    pairs = {name: (ours[name], theirs[name]) for name in ours if name in theirs}
    pairs["dtype"] = saved["dtype"], found["dtype"]
    told = [
        f"{name} is {one!r} there and {other!r} here"
        for name, (one, other) in pairs.items()
        if one != other and (name != "dtype" or None not in (one, other))
    ]
    digests = saved["weights"], found["weights"]
    if not told and None not in digests and digests[0] != digests[1]:
        told = ["its config is this one's, its weights are not"]
    return told


def _settings(config: PreTrainedConfig) -> dict[str, object]:
    left_out = _generic() | set(WITHOUT_EFFECT)
    found = {
        name: value
        for name, value in compat.text_config(config).to_dict().items()
        if name not in left_out and not name.startswith("_") and "dropout" not in name
    }
    # As a file gives it back.
    return json.loads(json.dumps(found, default=str, sort_keys=True))


@functools.lru_cache(maxsize=1)
def _generic() -> frozenset[str]:
    """Settings that every config has, but for those that tell models apart."""
    return frozenset(PreTrainedConfig().to_dict()) - {"model_type", "is_encoder_decoder"}


def _weights(model: torch.nn.Module) -> str | None:
    # The head makes no keys, and the same body may be had without it.
    body = getattr(model, "base_model", model)
    parts: dict[torch.device, list[torch.Tensor]] = {}
    order = []
    found = hashlib.sha256()
    for weight in body.parameters():
        x = weight.data
        if type(x) is not torch.Tensor or x.is_meta or not x.numel():
            return None
        found.update(f"{tuple(x.shape)} {x.dtype}\n".encode())
        few = x.flatten()[:: max(x.numel() // LOOKED_AT, 1)][:LOOKED_AT].contiguous().view(torch.uint8)
        parts.setdefault(x.device, []).append(few)
        order.append((x.device, few.numel()))
    # One copy from each device; then in the order of the model, which may be spread over them in any way.
    held = {device: memoryview(torch.cat(few).cpu().numpy()) for device, few in parts.items()}
    for device, count in order:
        found.update(held[device][:count])
        held[device] = held[device][count:]
    return found.hexdigest()
