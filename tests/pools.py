"""What the tests of pools have in common: small pages, and a prompt that a pool remembers."""

import torch

PAGE = 4
TOKEN = 2 * 2 * 2 * 16 * 4  # layers, sides, heads, width, bytes


def greedy(model, ids, cache, new=6, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=new, do_sample=False)


def known(model, pool, ids, mask=None):
    """The pool remembers a batch of prompts, and no cache is left."""
    cache = pool.open(ids, mask)
    greedy(model, ids, cache, 1, mask)
    pool.keep(cache)
