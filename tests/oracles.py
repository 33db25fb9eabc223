"""Slow and obvious references for what a compressed cache must answer; none of them calls the package under test.

`Keep` says which tokens one layer stores and how; `SlowLayer` replays it token by token in float64; `row_logits` runs a
whole Llama on it; `visibility` and `masked_logits` say the same through transformers' own forward and a 4D mask.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import torch
from transformers.models.llama.modeling_llama import LlamaForCausalLM, apply_rotary_pos_emb

# How this transformers calls its cache argument: `cache` where it knows that name, as the older one warns there.
NAMES = [
    name for name in ("cache", "past_key_values") if name in inspect.signature(LlamaForCausalLM.forward).parameters
]
NAME = NAMES[0]

# Two orders of summation of a softmax over a few dozen fp32 scores of size 50 differ by 50 * 2**-23, about 6e-6,
# relative to the output; two layers and the output head leave this in logits of size 6.
LOGITS = 1e-4
# The same where one kernel answers both sides, so that only the shape of the matrix products differs.
SAME_KERNEL = 2e-5


def unchanged(x):
    return x


@dataclass(frozen=True)
class Keep:
    """What one layer stores: the first `sinks` and the last `window` real tokens, or all of them (`window=None`).

    `compact`: the sinks are attended as if they stood right before the window. `keys` and `values` map what came in
    (`[kv_heads, tokens, head_dim]`) to what a codec gives back. With a `group` all tokens are stored, the first `sinks`
    and at least the last `residual` of them as they came in, and what lies between in whole groups.
    """

    sinks: int = 0
    window: int | None = None
    compact: bool = False
    keys: Callable = unchanged
    values: Callable = unchanged
    residual: int = 0
    group: int | None = None

    # Whether what is stored follows from positions alone.
    positional = True
    reads_queries = False
    # Bytes that a layer holds before any token, and numbers in the model's dtype of an encoded token, on both sides.
    basis_bytes = numbers = 0
    # Whether what tokens said of others outlives them.
    remembers = False

    @property
    def evicts(self):
        return self.window is not None

    def room(self, prompt):
        """Most tokens that a head stores after a first forward of `prompt` tokens, None for all."""
        return self.sinks + self.window if self.evicts else None

    def count(self, seen, prompt):
        """How many tokens a head stores once `seen` were seen, after a first forward of `prompt`."""
        return len(self.stored(seen))

    def score_bytes(self, tokens):
        """Bytes of scores in one row that stores `tokens` tokens."""
        return 0

    def layer(self, inv_freq=None):
        """One row of a layer that stores so."""
        return SlowLayer(self, inv_freq)

    def stored(self, seen):
        """Indices of the real tokens that are stored once `seen` of them were seen, in order."""
        if self.window is None:
            return list(range(seen))
        return sorted({*range(min(self.sinks, seen)), *range(max(seen - self.window, 0), seen)})

    def settled(self, seen):
        """How many of the `seen` tokens are sinks or encoded."""
        return self.sinks + self.group * (max(seen - self.residual - self.sinks, 0) // self.group)

    def read_back(self, side, x):
        """What is held of all tokens of a row, `x` `[kv_heads, seen, head_dim]`, its "keys" or "values"."""
        codec = getattr(self, side)
        if self.group is None:
            return codec(x)
        end = self.settled(x.shape[1])
        if end <= self.sinks:
            return x
        return torch.cat([x[:, : self.sinks], codec(x[:, self.sinks : end]), x[:, end:]], dim=1)


def rotate(x, inv_freq, shift):
    """`x` turned on by `shift` positions; channel i of the first half pairs with channel i of the second."""
    half = inv_freq.shape[0]
    angle = (inv_freq.double() * shift).repeat(2)
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    swapped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    return torch.cat([turned * angle.cos() + swapped * angle.sin(), rest], dim=-1)


class SlowLayer:
    """One row of one layer: real tokens only, keys already rotated to the position they came with."""

    def __init__(self, keep, inv_freq=None):
        self.keep, self.inv_freq = keep, inv_freq
        # Every real token ever seen, [kv_heads, seen, head_dim], as the codec returns it; and as it came in.
        self.keys = self.values = None
        self.raw = None
        self.stored = []
        self.recording = False  # nothing is dropped until the next `crop`

    @property
    def seen(self):
        return 0 if self.keys is None else self.keys.shape[1]

    def attend(self, query, key, value, scale):
        """query `[heads, n, head_dim]`, key and value `[kv_heads, n, head_dim]` of n new tokens. A query sees what was
        stored before, and the new tokens up to itself."""
        old_keys, old_values = key[:, :0].double(), value[:, :0].double()
        if self.stored:
            old_keys, old_values = self.keys[:, self.stored].double(), self.values[:, self.stored].double()
            dropped = self.seen - len(self.stored)
            if self.keep.compact and dropped:
                sinks = rotate(old_keys[:, : self.keep.sinks], self.inv_freq, dropped)
                old_keys = torch.cat([sinks, old_keys[:, self.keep.sinks :]], dim=1)
        groups = query.shape[0] // key.shape[0]
        keys = torch.cat([old_keys, key.double()], dim=1).repeat_interleave(groups, dim=0)
        values = torch.cat([old_values, value.double()], dim=1).repeat_interleave(groups, dim=0)
        scores = query.double() @ keys.transpose(1, 2) * scale
        new = query.shape[1]
        future = torch.ones(new, keys.shape[1], dtype=torch.bool).triu(keys.shape[1] - new + 1)
        return scores.masked_fill(future, -torch.inf).softmax(-1) @ values

    def store(self, key, value):
        new = (key, value)
        self.raw = new if self.raw is None else [torch.cat(pair, dim=1) for pair in zip(self.raw, new, strict=True)]
        if self.keep.group is None:
            new = self.keep.keys(key), self.keep.values(value)
        first = self.seen
        self.keys = new[0] if self.keys is None else torch.cat([self.keys, new[0]], dim=1)
        self.values = new[1] if self.values is None else torch.cat([self.values, new[1]], dim=1)
        self.stored += range(first, self.seen)
        if not self.recording:
            self._settle()

    def _settle(self):
        survivors = set(self.keep.stored(self.seen))
        self.stored = [i for i in self.stored if i in survivors]
        if self.keep.group is not None and self.seen:
            self.keys, self.values = map(self.keep.read_back, ("keys", "values"), self.raw)

    def held(self, head):
        """Which tokens a key-value head stores, in order."""
        return self.stored

    def crop(self, count):
        """The last `count` tokens were never there. Only meaningful while none of them took another's place."""
        if count and self.seen:
            self.raw = [x[:, :-count] for x in self.raw]
            self.keys, self.values = self.keys[:, :-count], self.values[:, :-count]
            self.stored = [i for i in self.stored if i < self.seen]
        self._settle()

    def copy(self):
        twin = copy.copy(self)
        twin.stored = list(self.stored)
        return twin


def per_layer(model, keeps):
    layers = model.config.num_hidden_layers
    return [keeps] * layers if isinstance(keeps, Keep) else list(keeps)


@torch.no_grad()
def row_logits(model, ids, chunks, keeps):
    """Logits `[tokens, vocab]` of one unpadded row `ids` `[tokens]` that a cache saw in `chunks` forwards."""
    body = model.model
    assert sum(chunks) == len(ids)
    hidden = body.embed_tokens(ids)[None]
    cos, sin = body.rotary_emb(hidden, torch.arange(len(ids))[None])
    for layer, keep in zip(body.layers, per_layer(model, keeps), strict=True):
        attention, slow = layer.self_attn, keep.layer(body.rotary_emb.inv_freq)
        query, key, value = project(attention, layer.input_layernorm(hidden), cos, sin)
        outputs = []
        for start, end in spans(chunks):
            q, k, v = query[0, :, start:end], key[0, :, start:end], value[0, :, start:end]
            outputs.append(slow.attend(q, k, v, attention.scaling))
            slow.store(k, v)
        heads = torch.cat(outputs, dim=1).transpose(0, 1).reshape(1, len(ids), -1).to(hidden.dtype)
        hidden = hidden + attention.o_proj(heads)
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(body.norm(hidden))[0]


def project(attention, hidden, cos, sin):
    """query, key and value `[batch, heads, tokens, head_dim]` as Llama's attention makes them."""
    shape = (*hidden.shape[:-1], -1, attention.head_dim)
    states = [p(hidden).view(shape).transpose(1, 2) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
    return *apply_rotary_pos_emb(states[0], states[1], cos, sin), states[2]


def spans(chunks):
    ends = list(accumulate(chunks))
    return list(zip([0, *ends[:-1]], ends, strict=True))


def batch_logits(model, ids, mask, chunks, keeps):
    """`row_logits` of every row alone, set back into `[batch, tokens, vocab]`; zero where a row is padding."""
    result = torch.zeros(*ids.shape, model.config.vocab_size)
    for row in range(len(ids)):
        real = mask[row].bool()
        own = [int(real[start:end].sum()) for start, end in spans(chunks)]
        result[row, real] = row_logits(model, ids[row, real], own, keeps)
    return result


@torch.no_grad()
def feed(model, cache, ids, chunks, mask=None):
    """Logits `[batch, tokens, vocab]` from one forward a chunk through `cache`. Positions go with a mask alone."""
    seen, outputs = cache.get_seq_length(), []
    for start, end in spans(chunks):
        extra = {NAME: cache}
        if mask is not None:
            positions = (mask[:, : seen + end].cumsum(-1) - 1).clamp(min=0)[:, seen + start :]
            extra |= {"attention_mask": mask[:, : seen + end], "position_ids": positions}
        outputs.append(model(ids[:, start:end], use_cache=True, **extra).logits)
    return torch.cat(outputs, dim=1)


def visibility(chunks, keep):
    """`[tokens, tokens]` booleans: does the query of the row see the key of the column?"""
    total = sum(chunks)
    visible = torch.zeros(total, total, dtype=torch.bool)
    for start, end in spans(chunks):
        visible[start:end, keep.stored(start)] = True
        visible[start:end, start:end] = torch.ones(end - start, end - start, dtype=torch.bool).tril()
    return visible


@torch.no_grad()
def masked_logits(model, ids, chunks, keeps):
    """One forward of transformers over `ids` `[1, tokens]` without a cache, each layer under its own visibility."""
    hooks, shape = [], (1, 1, ids.shape[1], ids.shape[1])
    for layer, keep in zip(model.model.layers, per_layer(model, keeps), strict=True):
        mask = torch.zeros(shape)
        mask.masked_fill_(~visibility(chunks, keep), torch.finfo(mask.dtype).min)

        def put(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(layer.self_attn.register_forward_pre_hook(put, with_kwargs=True))
    try:
        return model(ids, attention_mask=torch.zeros(shape), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def compact_logits(model, ids, keep, seen):
    """Last logits `[vocab]` of a one-layer model for token `seen` of `ids` `[1, tokens]`: a fresh forward over what was
    stored before it and itself, at positions 0, 1, 2 … of that short sequence."""
    kept = [*keep.stored(seen), seen]
    return model(ids[:, kept], attention_mask=torch.ones(1, len(kept)), use_cache=False).logits[0, -1]


def greedy_row(model, ids, made, keeps):
    """The greedy token after the prompt `ids` `[tokens]`, fed at once, and after each of `made` `[count]` but the last,
    fed one at a time: equal to `made` if and only if that is what greedy decoding gives."""
    row = torch.cat([ids, made[:-1]])
    return row_logits(model, row, [len(ids)] + [1] * (len(made) - 1), keeps)[len(ids) - 1 :].argmax(-1)
