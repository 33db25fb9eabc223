"""Re-rotation of cached keys: rotary embeddings are relative, so a key can be moved by rotating it once more.

A key is always rotated from its pristine copy, never step after step, so no error builds up. Variants whose frequencies
change with the length can't be moved, and raise.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Frequencies of these are fixed once the config is known.
STATIC_TYPES = ("default", "linear", "llama3", "yarn")
# Families that leave rotary embeddings out of their full-attention layers and use them in the sliding ones alone.
UNROTATED_FULL_ATTENTION = ("cohere2", "cohere2_moe", "exaone4", "exaone4_5", "exaone_moe", "kolibri1")
HINT = 'use positions="original" to keep the positions as they were'


@dataclass(frozen=True)
class Rope:
    """The rotation of one model: `inv_freq` in radians a position, one for each pair of channels.

    The first `2 * len(inv_freq)` channels are rotated, the others left (partial rotary). Pairs are channel i with
    channel i + half, or neighbours where `interleaved`.
    """

    inv_freq: tuple[float, ...]
    interleaved: bool = False

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> Rope:
        """Reads the rotation of a text model's full-attention layers from its config.

        Raises:
            ValueError: there is no rotary embedding, or one that can't be re-rotated; names the type.
        """
        kind = getattr(config, "model_type", type(config).__name__)
        parameters = getattr(config, "rope_parameters", None)
        if parameters and isinstance(parameters.get("full_attention"), dict):
            parameters = parameters["full_attention"]
        if not parameters or getattr(config, "qk_rope_head_dim", None):
            raise ValueError(f"the keys of a {kind} model can't be re-rotated: its cache holds no rotary keys; {HINT}")
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in STATIC_TYPES:
            raise ValueError(
                f"rope_type={rope_type!r} can't be re-rotated; supported are {', '.join(STATIC_TYPES)}; {HINT}"
            )
        return cls(_frequencies(config, rope_type), _interleaved(config, kind))

    def rotate(self, x: torch.Tensor, shift: int | torch.Tensor) -> torch.Tensor:
        """Moves keys by `shift` positions: what a key at position p would be at p + shift.

        Args:
            x: `[batch, kv_heads, tokens, head_dim]`, rotated at any positions.
            shift: positions to move by, one number, one for each row `[batch]` or for each token `[batch, tokens]`.

        Returns:
            A new tensor of x's shape and dtype, of the same norms.
        """
        if isinstance(shift, torch.Tensor):
            cos, sin = _angles(self.inv_freq, shift.to(x.device).double())
            where = (slice(None), None) if shift.ndim == 2 else (slice(None), None, None)
            cos, sin = cos[where], sin[where]
        else:
            cos, sin = _cached_angles(self.inv_freq, int(shift), x.device)
        width = 2 * len(self.inv_freq)
        head, rest = x[..., :width].float(), x[..., width:]
        if self.interleaved:
            first, second = head[..., 0::2], head[..., 1::2]
        else:
            first, second = head.chunk(2, dim=-1)
        moved = (first * cos - second * sin, second * cos + first * sin)
        head = torch.stack(moved, dim=-1).flatten(-2) if self.interleaved else torch.cat(moved, dim=-1)
        return torch.cat([head.to(x.dtype), rest], dim=-1)

    def mean_rotation(self, start: torch.Tensor, count: int, dim: int) -> torch.Tensor:
        """The mean of the rotations to the positions `start … start + count - 1`, as matrices of `dim` channels.

        Args:
            start: int64 `[rows]`.

        Returns:
            fp32 `[rows, dim, dim]`, to be multiplied with vectors from the left.
        """
        steps = torch.arange(count, device=start.device)
        cos, sin = (x.mean(1) for x in _angles(self.inv_freq, (start[:, None] + steps).double()))
        half = len(self.inv_freq)
        pairs = torch.arange(half, device=start.device)
        first, second = (2 * pairs, 2 * pairs + 1) if self.interleaved else (pairs, pairs + half)
        turn = torch.eye(dim, device=start.device).repeat(len(start), 1, 1)
        turn[:, first, first], turn[:, second, second] = cos, cos
        turn[:, first, second], turn[:, second, first] = -sin, sin
        return turn


def rope_of_layers(config: PreTrainedConfig, layers: list[int]) -> list[Rope | None]:
    """The rotation of each of the layers `layers`, None where a layer has no rotary embedding."""
    without = getattr(config, "no_rope_layers", None)
    if getattr(config, "model_type", "") in UNROTATED_FULL_ATTENTION and getattr(config, "sliding_window", None):
        return [None] * len(layers)
    rope = Rope.from_config(config)
    # In `no_rope_layers` 1 stands for a layer that has a rotary embedding.
    return [rope if not without or without[i] else None for i in layers]


def _angles(inv_freq: tuple[float, ...], shift: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # In fp64, since a shift of a million positions would lose its angle in fp32.
    angle = shift[..., None] * torch.tensor(inv_freq, dtype=torch.float64, device=shift.device)
    return angle.cos().float(), angle.sin().float()


@functools.lru_cache(maxsize=8)
def _cached_angles(inv_freq: tuple[float, ...], shift: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    # All layers of a step move by the same number of positions.
    with torch.inference_mode(False):
        return _angles(inv_freq, torch.tensor(shift, dtype=torch.float64, device=device))


def _frequencies(config: PreTrainedConfig, rope_type: str) -> tuple[float, ...]:
    extra = {"layer_type": "full_attention"} if "full_attention" in config.rope_parameters else {}
    if rope_type == "default":
        compute = _embedding(config).compute_default_rope_parameters
    else:
        compute = ROPE_INIT_FUNCTIONS[rope_type]
    # The scaling factor of yarn is already in the keys; moving them must leave their norms alone.
    inv_freq, _ = compute(config, **extra)
    return tuple(inv_freq.double().tolist())


def _modeling(config: PreTrainedConfig):
    return importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))


def _embedding(config: PreTrainedConfig) -> type:
    """The model's own rotary embedding: families differ in what of the config they heed."""
    for name, member in vars(_modeling(config)).items():
        vision = any(word in name for word in ("Vision", "Audio", "Image"))
        if name.endswith("RotaryEmbedding") and hasattr(member, "compute_default_rope_parameters") and not vision:
            return member
    raise ValueError(f"the keys of a {config.model_type} model can't be re-rotated: its embedding is not known; {HINT}")


def _interleaved(config: PreTrainedConfig, kind: str) -> bool:
    """Which channels the model pairs, asked of its own `rotate_half`."""
    rotate_half = getattr(_modeling(config), "rotate_half", None)
    probe = rotate_half(torch.arange(4.0)).tolist() if rotate_half else None
    if probe == [-2.0, -3.0, 0.0, 1.0]:
        return False
    if probe == [-1.0, 0.0, -3.0, 2.0]:
        return True
    raise ValueError(f"the keys of a {kind} model can't be re-rotated: its rotary embedding is not known; {HINT}")
