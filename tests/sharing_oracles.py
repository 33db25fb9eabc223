"""What layers that share keys and values must answer, three ways; none of them calls the package under test.

`Lending` is a `DynamicCache` of transformers whose borrowing layers are given the owner's tensors; `by_hand` is a whole
Llama without any cache, through which gradients flow; `SharedTape` replays each group of layers in float64.
"""

import torch
from transformers import DynamicCache

from tests.oracles import per_layer, project, spans, visibility
from tests.tape import Replay, Tape

GROUPINGS = {"pairs": [[0, 1], [2, 3]], "threes": [[0, 1, 2], [3, 4]], "apart": [[0, 3], [1, 2, 4]]}


def owner_of(groups):
    """The owner of each layer that borrows."""
    return {layer: group[0] for group in groups for layer in group[1:]}


class Lending(DynamicCache):
    """Layers that borrow read what the owner's update returned in the same forward."""

    def __init__(self, config, groups):
        super().__init__(config=config)
        self.owner_of, self.shown = owner_of(groups), {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        owner = self.owner_of.get(layer_idx, layer_idx)
        if owner == layer_idx:
            self.shown[owner] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return self.shown[owner]

    def crop(self, count):
        for layer in self.layers:
            if layer.get_seq_length():
                layer.crop(count)


def by_hand(model, ids, groups, past=0, coded=None, mask=None):
    """Logits `[batch, tokens, vocab]` of a Llama whose borrowing layers attend to their owner's keys and values.

    To the queries after the first `past` tokens the keys and values of those are constants, given back by the two
    functions `coded` where there are any. `mask` `[tokens, tokens]` tells what a query sees, by default what lies
    before it.
    """
    body, owners, made, total = model.model, owner_of(groups), {}, ids.shape[1]
    hidden = body.embed_tokens(ids)
    cos, sin = body.rotary_emb(hidden, torch.arange(total)[None])
    visible = torch.ones(total, total, dtype=torch.bool).tril() if mask is None else mask
    for i, layer in enumerate(body.layers):
        attention = layer.self_attn
        query, *own = project(attention, layer.input_layernorm(hidden), cos, sin)
        made[i] = made[owners[i]] if i in owners else own
        outputs = []
        for start, end in spans([past, total - past]):
            sides = []
            for side, x in enumerate(made[i]):
                old = x[:, :, :start].detach()
                old = old if coded is None else coded[side](old)
                side = torch.cat([old, x[:, :, start:end]], dim=2)
                sides.append(side.repeat_interleave(attention.num_key_value_groups, dim=1))
            scores = query[:, :, start:end] @ sides[0].transpose(2, 3) * attention.scaling
            outputs.append(scores.masked_fill(~visible[start:end, :end], -torch.inf).softmax(-1) @ sides[1])
        hidden = hidden + attention.o_proj(torch.cat(outputs, dim=2).transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(body.norm(hidden))


def masked_by_hand(model, ids, chunks, groups, keep):
    """`by_hand` where a query sees what `keep` had stored before its forward, and its forward up to itself."""
    with torch.no_grad():
        return by_hand(model, ids, groups, mask=visibility(chunks, keep))


class SharedTape(Tape):
    """A tape of a model whose layers share."""

    def __init__(self, model, cache, groups):
        super().__init__(model, cache)
        self.groups = groups

    def replay(self, keeps, mask=None):
        keeps = per_layer(self.model, keeps)
        attentions = [layer.self_attn for layer in self.model.model.layers]
        worst, state = 0.0, SharedReplay(keeps, self.model.model.rotary_emb.inv_freq, mask, self.groups)
        for event in self.events:
            if event[0] == "forward":
                _, layer, states, answer = event
                worst = max(worst, state.forward(layer, *states, answer, attentions[layer].scaling))
            else:
                getattr(state, event[0])(event[1])
        return worst, state.rows


class SharedReplay(Replay):
    """Of each group only the owner has slow layers: the others ask those, which settle once all have asked."""

    def __init__(self, keeps, inv_freq, mask, groups):
        self.owner_of, self.given = owner_of(groups), {}
        self.last = {group[0]: group[-1] for group in groups}
        super().__init__(keeps, inv_freq, mask)

    def forward(self, layer, query, key, value, answer, scale):
        owner = self.owner_of.get(layer, layer)
        batch, _, new, _ = query.shape
        if self.mask is not None and len(self.mask) < batch:
            self.mask = self.mask.repeat_interleave(batch // len(self.mask), dim=0)
        if owner == layer:
            self.given[owner] = key, value, [[] for _ in range(batch)]
        key, value, asked = self.given[owner]
        if not self.rows[owner]:
            self.rows[owner] = [self.keeps[owner].layer(self.inv_freq) for _ in range(batch)]
        start, worst = self.columns[owner], 0.0
        for row, slow in enumerate(self.rows[owner]):
            real = torch.ones(new, dtype=torch.bool)
            if self.mask is not None:
                known = self.mask[row, start : start + new].bool()
                real[: len(known)] = known
            slow.recording = self.recording
            q, k, v = query[row, :, real], key[row, :, real], value[row, :, real]
            expected = slow.attend(q, k, v, scale).transpose(0, 1).flatten(1)
            if real.any():
                worst = max(worst, float((expected - answer[row, real]).abs().max()))
            asked[row].append((q, getattr(slow, "weights", None)))
            if layer == self.last.get(owner, owner):
                self._join(slow, asked[row], len(k))
                slow.store(k, v)
        if layer == self.last.get(owner, owner):
            self.columns[owner] += new
        return worst

    @staticmethod
    def _join(slow, asked, heads):
        """What a group of layers asked counts as one: the mean of what they paid, and the queries of all of them."""
        if asked[0][1] is not None:
            slow.weights = [torch.stack(paid).mean(0) for paid in zip(*(paid for _, paid in asked), strict=True)]
            slow.query = torch.cat([query.unflatten(0, (heads, -1)) for query, _ in asked], dim=1).flatten(0, 1)
