"""What a trained model's layers have in common: which may share keys and values, and in which directions these lie.

Both are found by running the model over texts. Must never change the model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from kvplug import compat, files
from kvplug.build import make_layers
from kvplug.cache import KVCache
from kvplug.fingerprint import fingerprint
from kvplug.layer import KVLayer
from kvplug.low_rank_plan import SIDES, LowRankPlan
from kvplug.policies.positional import check_count
from kvplug.sharing import groups
from kvplug.sharing_plan import SharingPlan

# Tokens of a text on which pairs are compared.
GLANCE = 128
# First tokens of a text, which are unlike all others.
FIRST = 4

Pair = tuple[int, int]


@torch.no_grad()
def calibrate_sharing(
    model: PreTrainedModel,
    texts: Sequence[str | torch.Tensor],
    share: float = 0.25,
    *,
    path: files.Path | None = None,
    tokenizer: object = None,
    tokens: int = 256,
    candidates: int = 8,
    progress: bool = True,
) -> SharingPlan:
    """Searches which layers of a trained model can read the keys and values of another one at the least damage.

    Nothing is assumed of which layers go together: every pair is tried, and each step of the search is measured.
    As in KVSharer (Yang et al., 2024, arXiv:2410.18517) any earlier layer may be the owner, not the neighbour alone:
    the best one is often far away. Where KVSharer goes by how much the keys and values of two layers differ, damage is
    measured here: KL(model ‖ model that shares), in nats a token. First each pair by itself on the first tokens of each
    text; then layer after layer is given up, each time the one of the `candidates` best pairs that, together with what
    is shared already, does the least damage on all tokens.

    It takes layers * layers / 2 + candidates * share * layers forwards over the texts, once for a model; bad news is
    part of the result: `report` tells the damage, step by step.

    Args:
        model: a causal language model of transformers, routed through kvplug from then on.
        texts: what the model is to be good at: strings, or token numbers `[tokens]`. A few different ones do.
        share: the part of the full-attention layers that are to store nothing, below 1.
        path: a file for the plan, for `SharedCache(model, plan=path)`.
        tokenizer: makes tokens of strings; None for the one that lies where the model was loaded from.
        tokens: most tokens of a text that are looked at, at least 2. Log probabilities of all of them are held.
        candidates: pairs that are tried at each step.
        progress: shows a bar over the forwards.

    Returns:
        The plan.

    Raises:
        ValueError: an argument is not valid, or the model's layers are too few or too unlike for so large a share.
        OSError: the file can't be written.
    """
    _check_model(model)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        raise ValueError(f"share={share!r} is not valid; a part of the layers between 0 and 1 is accepted")
    check_count("tokens", tokens, 2)
    check_count("candidates", candidates, 1)
    rows = [row[:tokens].to(model.device)[None] for row in _rows(texts, model, tokenizer)]
    layers = [i for i, layer in enumerate(make_layers(model, None, None)) if isinstance(layer, KVLayer)]
    borrowers = round(share * len(layers))
    alike = _alike(model, layers)
    if borrowers == 0 or len({borrower for _, borrower in alike}) < borrowers:
        raise ValueError(
            f"share={share!r} of {len(layers)} full-attention layers can't be had: {len({b for _, b in alike})} of "
            "them have an earlier one of the same shape, and at least one must be to share; another share is accepted"
        )
    was_training = model.training
    model.eval()
    try:
        with tqdm(total=len(alike) + borrowers * candidates, disable=not progress, desc="sharing", unit="try") as bar:
            glance = _damage(model, [row[:, :GLANCE] for row in rows], bar)
            alone = {pair: glance([list(pair)]) for pair in alike}
            steps = search(_damage(model, rows, bar), alone, borrowers, candidates)
    finally:
        model.train(was_training)
    owned: dict[int, int] = {}
    for pair, _ in steps:
        owned = given_up(owned, pair)
    told = [{"owner": owner, "layer": borrower, "kl": kl} for (owner, borrower), kl in steps]
    report = {"tokens": sum(row.shape[1] for row in rows), "candidates": candidates, "steps": told}
    plan = SharingPlan(groups(owned), borrowers / len(layers), fingerprint(model), report)
    if path is not None:
        plan.save(path)
    return plan


@torch.no_grad()
def calibrate_low_rank(
    model: PreTrainedModel,
    texts: Sequence[str | torch.Tensor],
    rank: float = 0.5,
    *,
    path: files.Path | None = None,
    tokenizer: object = None,
    tokens: int = 1024,
    group: int = 4,
    progress: bool = True,
) -> LowRankPlan:
    """Finds the directions that keys and values of neighbouring layers mostly lie in, for `LowRankCache`.

    One forward over each text; then for each group of layers the eigenvectors of what all heads have in common. The
    first tokens of a text, which a cache keeps as they are, are left out.

    Args:
        model: a causal language model of transformers, routed through kvplug from then on.
        texts: like what the model will read: strings, or token numbers `[tokens]`. More tokens than a group of layers
            has channels are needed, several times as many do well.
        rank: the largest part of the directions that a cache may keep, up to 1.
        path: a file for the plan, for `LowRankCache(model, plan=path)`.
        tokenizer: makes tokens of strings; None for the one that lies where the model was loaded from.
        tokens: most tokens of a text that are looked at, at least 8.
        group: neighbouring full-attention layers that are written in one basis. More need fewer bytes for the same
            error and more arithmetic.
        progress: shows a bar over the forwards.

    Returns:
        The plan.

    Raises:
        ValueError: an argument is not valid, there are too few tokens, or layers of a group are unlike.
        OSError: the file can't be written.
    """
    _check_model(model)
    if isinstance(rank, bool) or not isinstance(rank, int | float) or not 0 < rank <= 1:
        raise ValueError(f"rank={rank!r} is not valid; a part of the directions, above 0 and up to 1, is accepted")
    check_count("tokens", tokens, 2 * FIRST)
    check_count("group", group, 1)
    rows = [row[:tokens].to(model.device)[None] for row in _rows(texts, model, tokenizer)]
    layers = [i for i, layer in enumerate(make_layers(model, None, None)) if isinstance(layer, KVLayer)]
    found = [layers[i : i + group] for i in range(0, len(layers), group)]
    _check_tokens(model, found, sum(max(row.shape[1] - FIRST, 0) for row in rows))
    sums: dict[tuple[str, int], torch.Tensor] = {}
    for row in tqdm(rows, disable=not progress, desc="directions", unit="text"):
        cache = KVCache(model)
        _predictions(model, row, cache)
        for key in itertools.product(SIDES, range(len(found))):
            flat = _side_by_side(cache, key[0], found[key[1]]).flatten(1)
            sums[key] = sums.get(key, 0) + (flat.T @ flat).double()
    bases = {
        side: [
            _basis(sums[side, i], rank, _side_by_side(cache, side, members).shape[1:])
            for i, members in enumerate(found)
        ]
        for side in SIDES
    }
    plan = LowRankPlan(found, rank, bases, fingerprint(model))
    if path is not None:
        plan.save(path)
    return plan


def _check_tokens(model: PreTrainedModel, found: list[list[int]], tokens: int) -> None:
    """Raises ValueError where a group has layers of different shapes, or more channels than there are tokens."""
    text = compat.text_config(model.config)
    for members in found:
        shapes = {compat.kv_shape(text, i) for i in members}
        if len(shapes) > 1:
            raise ValueError(f"group={len(members)} puts layers {members} of different shapes together; 1 is accepted")
        [(heads, *widths)] = shapes
        channels = heads * max(widths) * len(members)
        if tokens < channels:
            raise ValueError(
                f"texts have {tokens} tokens beside the first {FIRST} of each, and layers {members} have {channels} "
                "channels together; at least as many tokens are accepted"
            )


def _side_by_side(cache: KVCache, side: str, layers: list[int]) -> torch.Tensor:
    """What a cache of one row holds of layers, `[tokens, layers * kv_heads, head_dim]`, without the first tokens."""
    parts = [getattr(cache.layers[i], side)[0, :, FIRST:].float() for i in layers]
    return torch.cat([part.to(parts[0].device) for part in parts]).transpose(0, 1)


def _basis(products: torch.Tensor, rank: float, shape: tuple[int, int]) -> torch.Tensor:
    """The loudest directions, `[heads, directions, head_dim]`, from sums of products `[channels, channels]`."""
    directions = torch.linalg.eigh(products).eigenvectors.flip(-1).T[: max(round(rank * len(products)), 1)]
    return directions.unflatten(1, shape).transpose(0, 1).float().contiguous().cpu()


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"model={type(model).__name__} is not accepted; pass a transformers model")


def search(
    damage: Callable[[list[list[int]]], float], alone: Mapping[Pair, float], borrowers: int, candidates: int
) -> list[tuple[Pair, float]]:
    """Gives up layer after layer, each time that which does the least damage together with those before.

    Args:
        damage: of groups that share, in any unit.
        alone: damage of each pair of an owner and a borrower by itself, which tells what is tried first.
        borrowers: how many layers are given up.
        candidates: pairs that are tried at each step.

    Returns:
        Each pair that was chosen, and the damage of all up to then; fewer where no pair is left.
    """
    ordered = sorted(alone, key=lambda pair: (alone[pair], pair))
    chosen: list[tuple[Pair, float]] = []
    owned: dict[int, int] = {}
    for _ in range(borrowers):
        free = [pair for pair in ordered if owned.keys().isdisjoint(pair)]
        tried = [(damage(groups(given_up(owned, pair))), pair) for pair in free[:candidates]]
        if tried:
            least, pair = min(tried)
            owned = given_up(owned, pair)
            chosen.append((pair, least))
    return chosen


def given_up(owned: Mapping[int, int], pair: Pair) -> dict[int, int]:
    """The owner of each layer that borrows, once a layer that owned borrows too, and those that read it with it."""
    owner, borrower = pair
    return {layer: owner if one == borrower else one for layer, one in owned.items()} | {borrower: owner}


def _rows(texts: object, model: PreTrainedModel, tokenizer: object) -> list[torch.Tensor]:
    """Token numbers of each text, `[tokens]`."""
    if isinstance(texts, str | torch.Tensor) or not texts:
        raise ValueError(f"texts={texts!r:.60} is not accepted; a list of at least one string or of token numbers is")
    rows = []
    for number, text in enumerate(texts):
        if isinstance(text, str):
            tokenizer = tokenizer or _tokenizer(model)
            text = torch.tensor(tokenizer(text).input_ids)
        whole = isinstance(text, torch.Tensor) and not text.is_floating_point() and text.dtype != torch.bool
        if not whole or text.ndim != 1 or len(text) < 2:
            told = tuple(text.shape) if isinstance(text, torch.Tensor) else type(text).__name__
            raise ValueError(f"texts[{number}]={told} is not accepted; a string or token numbers [tokens], at least 2")
        rows.append(text)
    return rows


def _tokenizer(model: PreTrainedModel) -> object:
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer=None: there is none where the model was loaded from, {model.name_or_path!r}; a tokenizer, or "
            "token numbers as texts, are accepted"
        ) from error


def _alike(model: PreTrainedModel, layers: list[int]) -> list[Pair]:
    """Each pair of layers of equal shapes, the earlier one first."""
    text = compat.text_config(model.config)
    shapes = {i: compat.kv_shape(text, i) for i in layers}
    return [(a, b) for b in layers for a in layers if a < b and shapes[a] == shapes[b]]


def _damage(model: PreTrainedModel, rows: list[torch.Tensor], bar: tqdm) -> Callable[[list[list[int]]], float]:
    """What sharing does to the predictions for `rows`, each `[1, tokens]`: KL to the model's own, nats a token."""
    own = [_predictions(model, row, KVCache(model)) for row in rows]

    def damage(found: list[list[int]]) -> float:
        total, cache = 0.0, KVCache(model, share=found)
        for row, sure in zip(rows, own, strict=True):
            total += (sure.exp() * (sure - _predictions(model, row, cache))).sum().item()
        bar.update()
        return total / sum(row.shape[1] for row in rows)

    return damage


def _predictions(model: PreTrainedModel, row: torch.Tensor, cache: KVCache) -> torch.Tensor:
    """Log probabilities, fp32 `[1, tokens, vocabulary]`."""
    cache.reset()
    return model(input_ids=row, use_cache=True, **{compat.cache_argument(model): cache}).logits.float().log_softmax(-1)
