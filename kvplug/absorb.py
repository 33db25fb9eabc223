"""Latent attention decodes in latent space: `absorb` changes what a model's attention modules hand to their attention
function, and `unabsorb` changes it back.

What a model computes without one of our caches must never change, nor what its weights are.
"""

from __future__ import annotations

import weakref

import torch

from kvplug.attention import NAME
from kvplug.kernels.latent import Latents
from kvplug.view import plain_view, view_of

ACCEPTED = (
    "a model is accepted whose attention modules, like those of DeepSeek-V2 and V3, have a method `expand_kv` and as "
    "`kv_b_proj` a plain torch.nn.Linear without bias"
)
WIDTHS = ("num_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim")


class Expansion:
    """Stands in for a module's method `expand_kv`, with the same arguments.

    Handles of a cache of ours are passed on to attention as `Latents`; anything else is expanded as before.
    """

    def __init__(self, module: torch.nn.Module):
        # Weak, so that a model is freed as soon as it is dropped.
        self._module = weakref.ref(module)

    def __reduce__(self):
        # A module is copied and pickled before what it holds, so this finds the copy.
        return Expansion, (self._module(),)

    def __call__(self, kv_nope: torch.Tensor, k_rot: torch.Tensor):
        module = self._module()
        up = _up(module) if module.config._attn_implementation == NAME else None
        if up is not None and up.device == kv_nope.device:
            expand = type(module).expand_kv.__get__(module)
            view = view_of(kv_nope, k_rot)
            if view is not None:
                latents = Latents(view, up, expand)
                return latents, latents
            view = plain_view(kv_nope, k_rot)
            if view is not None:
                latents = Latents(view, up, expand, plain=(kv_nope, k_rot))
                return latents, latents
        return type(module).expand_kv(module, kv_nope, k_rot)


def _up(module: torch.nn.Module) -> torch.Tensor | None:
    """The weights of `kv_b_proj`, `[heads, nope_dim + value_dim, rank]`, a view; None where they aren't all of it."""
    linear = module.kv_b_proj
    if type(linear) is not torch.nn.Linear or linear.bias is not None:
        return None
    return linear.weight.unflatten(0, (module.num_heads, -1))


def absorb(model: torch.nn.Module) -> None:
    """Lets a model with latent attention (MLA) decode on the cached latents, without expanding them for each token.

    The projections from a latent to keys and values are absorbed into the query and the output: a score is
    `(query W_UK) . latent + rotated query . rotated key`, the output `(weights . latents) W_UV` (DeepSeek-AI,
    "DeepSeek-V2", 2024, https://arxiv.org/abs/2405.04434, section 2.1). Forwards through a cache of kvplug alone
    change, and among them those that it makes cheaper; a prompt is expanded as before. Caches that drop tokens can be
    used from then on. No weight is copied or changed. A model that is absorbed stays as it is.

    Args:
        model: a transformers model; its attention has to be routed through kvplug, as building a cache from it does.

    Raises:
        ValueError: the model has no latent attention that can be absorbed; names its class and what is accepted.
    """
    modules = _modules(model)
    if not modules:
        raise ValueError(f"model={type(model).__name__} has no latent attention that can be absorbed; {ACCEPTED}")
    for name, module in modules.items():
        if not isinstance(vars(module).get("expand_kv"), Expansion):
            _check(model, name, module)
    for module in modules.values():
        module.expand_kv = Expansion(module)


def unabsorb(model: torch.nn.Module) -> None:
    """Gives a model back what `absorb` changed; a model that isn't absorbed stays as it is.

    Raises:
        ValueError: it isn't a model.
    """
    for module in _modules(model).values():
        if isinstance(vars(module).get("expand_kv"), Expansion):
            del module.expand_kv


def is_absorbed(model: object) -> bool:
    """Whether `absorb` has changed a model."""
    found = model.modules() if isinstance(model, torch.nn.Module) else ()
    return any(isinstance(vars(module).get("expand_kv"), Expansion) for module in found)


def _modules(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"model={type(model).__name__} is not accepted; pass a transformers model")
    return {name: module for name, module in model.named_modules() if hasattr(type(module), "expand_kv")}


def _check(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    """Raises ValueError where an attention module's expansion isn't the product with `kv_b_proj` alone."""
    where = f"model={type(model).__name__} can't be absorbed: {name} ({type(module).__name__})"
    if hasattr(module, "indexer"):
        raise ValueError(f"{where} chooses by itself which tokens it reads (sparse attention); {ACCEPTED}")
    linear = getattr(module, "kv_b_proj", None)
    if type(linear) is not torch.nn.Linear or linear.bias is not None:
        told = "with a bias" if type(linear) is torch.nn.Linear else "as kv_b_proj"
        raise ValueError(f"{where} has a {type(linear).__name__} {told}; {ACCEPTED}")
    lacking = [width for width in (*WIDTHS, "config") if not hasattr(module, width)]
    if lacking:
        raise ValueError(f"{where} has no {', '.join(lacking)}; {ACCEPTED}")
    heads, nope, value, rank, rope = (getattr(module, width) for width in WIDTHS)
    if linear.weight.shape != (heads * (nope + value), rank) or not _as_expected(module, nope, rank, rope):
        raise ValueError(f"{where} expands its latents in another way; {ACCEPTED}")


@torch.no_grad()
def _as_expected(module: torch.nn.Module, nope: int, rank: int, rope: int) -> bool:
    """Whether one token's latent is expanded as the weights say."""
    weight = module.kv_b_proj.weight
    if weight.is_meta:
        return True
    latent, rotated = (torch.linspace(-1, 1, n, device=weight.device, dtype=weight.dtype) for n in (rank, rope))
    keys, values = module.expand_kv(latent[None, None, None], rotated[None, None, None])
    made = _up(module) @ latent
    close = 0.02 * made.abs().amax()
    expected = made[:, :nope], rotated.expand(len(made), -1), made[:, nope:]
    found = keys[0, :, 0, :nope], keys[0, :, 0, nope:], values[0, :, 0]
    return all(
        x.shape == y.shape and bool(((x - y).abs() <= close).all()) for x, y in zip(found, expected, strict=True)
    )
