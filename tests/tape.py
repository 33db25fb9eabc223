"""A recorder: what every attention layer of a Llama received and answered, and what was done to its cache in between.

Replaying a tape through `SlowLayer` compares each layer on exactly the inputs that it had, so that rounding in earlier
layers can't turn a code of a later one, and it works under any of `generate`'s modes: beams, crops, repeated rows.
"""

import torch

from tests.oracles import per_layer, project

METHODS = (
    "reorder_cache",
    "batch_repeat_interleave",
    "batch_select_indices",
    "activate_past_recording",
    "crop",
    "reset",
)


class Tape:
    def __init__(self, model, cache):
        self.model, self.cache, self.events, self.hooks = model, cache, [], []

    def __enter__(self):
        for index, layer in enumerate(self.model.model.layers):
            attention = layer.self_attn
            self.hooks.append(attention.register_forward_pre_hook(self._inputs(index), with_kwargs=True))
            self.hooks.append(attention.o_proj.register_forward_pre_hook(self._output))
        for name in METHODS:
            setattr(self.cache, name, self._method(name, getattr(self.cache, name)))
        return self

    def __exit__(self, *exception):
        for hook in self.hooks:
            hook.remove()
        for name in METHODS:
            delattr(self.cache, name)

    def _inputs(self, index):
        def hook(attention, args, kwargs):
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            states = project(attention, hidden, *kwargs["position_embeddings"])
            self.events.append(["forward", index, states])

        return hook

    def _output(self, module, args):
        self.events[-1].append(args[0].clone())

    def _method(self, name, original):
        def method(argument=None):
            copied = argument.clone() if isinstance(argument, torch.Tensor) else argument
            self.events.append((name, copied))
            return original() if argument is None else original(argument)

        return method

    def worst(self, keeps, mask=None):
        """The largest difference between what any layer answered for a real token and what `SlowLayer` answers.

        `mask` `[batch, tokens]` marks padding among the first tokens, all later ones are real.
        """
        return self.replay(keeps, mask)[0]

    def replay(self, keeps, mask=None):
        """`worst`, and the slow layers as they are at the end: a list of rows for each layer of the model."""
        keeps = per_layer(self.model, keeps)
        attentions = [layer.self_attn for layer in self.model.model.layers]
        inv_freq = self.model.model.rotary_emb.inv_freq
        worst = 0.0
        state = Replay(keeps, inv_freq, mask)
        for event in self.events:
            if event[0] == "forward":
                _, layer, (query, key, value), answer = event
                worst = max(worst, state.forward(layer, query, key, value, answer, attentions[layer].scaling))
            else:
                getattr(state, event[0])(event[1])
        return worst, state.rows


class Replay:
    """The `SlowLayer`s of every layer and row of a batch, and what a cache's methods do to them."""

    def __init__(self, keeps, inv_freq, mask):
        self.keeps, self.inv_freq, self.first_mask = keeps, inv_freq, mask
        self.reset()

    def reset(self, _=None):
        self.mask, self.rows = self.first_mask, [[] for _ in self.keeps]
        self.columns, self.recording = [0] * len(self.keeps), False

    def forward(self, layer, query, key, value, answer, scale):
        batch, _, new, _ = query.shape
        if self.mask is not None and len(self.mask) < batch:  # beams: generate repeats the rows of the prompt first
            self.mask = self.mask.repeat_interleave(batch // len(self.mask), dim=0)
        if not self.rows[layer]:
            self.rows[layer] = [self.keeps[layer].layer(self.inv_freq) for _ in range(batch)]
        assert len(self.rows[layer]) == batch
        start = self.columns[layer]
        self.columns[layer] += new
        worst = 0.0
        for row, slow in enumerate(self.rows[layer]):
            real = torch.ones(new, dtype=torch.bool)
            if self.mask is not None:
                known = self.mask[row, start : start + new].bool()
                real[: len(known)] = known
            slow.recording = self.recording
            together = [rows[row] for rows in self.rows if rows]
            for one in together:
                one.row = together
            q, k, v = query[row, :, real], key[row, :, real], value[row, :, real]
            expected = slow.attend(q, k, v, scale).transpose(0, 1).flatten(1)
            if real.any():
                worst = max(worst, float((expected - answer[row, real]).abs().max()))
            slow.store(k, v)
        return worst

    def _choose(self, rows):
        self.rows = [[layer[i].copy() for i in rows] if layer else [] for layer in self.rows]
        self.mask = self.mask if self.mask is None else self.mask[rows]

    def reorder_cache(self, index):
        self._choose(index.tolist())

    def batch_select_indices(self, index):
        self._choose(index.tolist())

    def batch_repeat_interleave(self, repeats):
        batch = max(len(layer) for layer in self.rows)
        self._choose([row for row in range(batch) for _ in range(repeats)])

    def activate_past_recording(self, _=None):
        self.recording = True

    def crop(self, count):
        for layer in self.rows:
            for slow in layer:
                slow.crop(-count)
        self.columns = [column + count for column in self.columns]
