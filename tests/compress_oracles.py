"""The slow reference of a context that was compressed: transformers' own eager attention says what is kept, and what a
question then reads. Nothing here calls the package under test.
"""

import torch

from tests import models

# Those of `tests.models.tiny_llama`; two query heads share each of the key-value heads.
LAYERS = HEADS = 2


def eager():
    return models.tiny_llama(attention="eager")


@torch.no_grad()
def most_attention(ids, chunk=None, instruction=None, lead=8):
    """The most attention that any query of a repetition pays to each token of the context, `[layers, kv_heads,
    tokens]`, from transformers' eager attention over the context and what is repeated behind it."""
    model, best = eager(), torch.zeros(LAYERS, HEADS, ids.shape[1])
    chunk = chunk or ids.shape[1]
    for start in range(0, ids.shape[1], chunk):
        said = [ids, ids[:, max(start - lead, 0) : start + chunk]]
        if instruction is not None:
            said.insert(1, instruction)
        weights = model(torch.cat(said, 1), use_cache=False, output_attentions=True).attentions
        for layer, one in enumerate(weights):
            paid = one[0, :, ids.shape[1] :, : ids.shape[1]].unflatten(0, (HEADS, -1))  # kv_heads, group, queries, …
            best[layer] = torch.maximum(best[layer], paid.amax((1, 2)))
    return best


def chosen(scores, mean, sinks, recent):
    """Tokens that each head of each layer keeps if all compete for `mean` a head, `[layers][heads]` lists: the last
    `recent` stay up to half of the budget, then the first `sinks`, then those with the highest of `scores`."""
    layers, heads, tokens = scores.shape
    recent = min(recent, mean // 2)
    sinks = min(sinks, mean - recent)
    everyone = [
        (
            token >= tokens - recent,
            min(sinks - token, 1) if token < sinks else 0,
            float(scores[layer, head, token]),
            (layer, head, token),
        )
        for layer in range(layers)
        for head in range(heads)
        for token in range(tokens)
    ]
    stay = {name for *_, name in sorted(everyone, reverse=True)[: mean * layers * heads]}
    return [[[t for t in range(tokens) if (i, head, t) in stay] for head in range(heads)] for i in range(layers)]


@torch.no_grad()
def masked(ids, first, heads):
    """Logits of the tokens from `first` on in one forward without a cache, in which each of them sees of the context
    what its head of its layer kept."""
    model, total = eager(), ids.shape[1]
    hooks = []
    for layer, lists in zip(model.model.layers, heads, strict=True):
        seen = torch.ones(HEADS, total, total, dtype=torch.bool).tril()
        for head, tokens in enumerate(lists):
            dropped = [token for token in range(first) if token not in tokens]
            seen[head, first:, dropped] = False
        mask = torch.zeros(1, 2 * HEADS, total, total)
        mask.masked_fill_(~seen.repeat_interleave(2, 0)[None], torch.finfo(mask.dtype).min)

        def put(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    out = model(ids, use_cache=False).logits[:, first:]
    for hook in hooks:
        hook.remove()
    return out
