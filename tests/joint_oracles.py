"""What layers that are stored together must answer, from its description in double precision; none of this calls the
package under test.

`merged` and `projected` say what two layers, or several, get back of `[layers * kv_heads, tokens, head_dim]`; a
`JointKeep` is what one of the layers stores, and the tape's replay tells each slow layer of its row's others.
"""

from dataclasses import dataclass

import torch

from tests.oracles import Keep, SlowLayer


@dataclass(frozen=True)
class MergedTwin:
    """Around the mean of each layer's group of tokens, in bfloat16: the best single direction for both layers' vectors,
    their products with it in bfloat16, and for the `distinct` tokens of each group and head that miss most, what they
    miss."""

    group: int
    distinct: int

    def __call__(self, x):
        heads, tokens, _ = x.shape
        means = [part.float().mean(1, keepdim=True).bfloat16().double() for part in x.split(self.group, dim=1)]
        mean = torch.cat([m.expand(-1, self.group, -1) for m in means], dim=1)[:, :tokens]
        y, out = x.double() - mean, torch.zeros(x.shape, dtype=torch.float64)
        for head in range(heads // 2):
            pair = [head, head + heads // 2]
            for token in range(tokens):
                direction = torch.linalg.svd(y[pair, token], full_matrices=False).Vh[0]
                for one in pair:
                    out[one, token] = direction * (y[one, token] @ direction).bfloat16().double()
        missed = (y - out).norm(dim=-1)
        out += mean
        for head in range(heads):
            for start in range(0, tokens, self.group):
                part = missed[head, start : start + self.group]
                kept = start + part.topk(min(self.distinct, len(part))).indices
                out[head, kept] = x[head, kept].double()
        return out.to(x.dtype)


@dataclass(frozen=True, eq=False)
class ProjectedTwin:
    """What lies in the span of a basis `[layers * kv_heads, rank, head_dim]`."""

    basis: torch.Tensor

    def __call__(self, x):
        basis = self.basis.double()
        coordinates = torch.einsum("htd,hrd->tr", x.double(), basis)
        return torch.einsum("tr,hrd->htd", coordinates, basis).to(x.dtype)


@dataclass(frozen=True)
class JointKeep(Keep):
    """What layer number `member` of a group stores; `keys` and `values` map what all layers of the group hold."""

    member: int = 0
    # The layer's share of a basis in bytes, and of the numbers in the model's dtype of a row's encoded token.
    basis_bytes: int = 0
    numbers: int = 0

    def layer(self, inv_freq=None):
        return JointSlowLayer(self, inv_freq)


class JointSlowLayer(SlowLayer):
    """Reads back late: what is encoded of a token is known once all layers of the row have it."""

    # Until then it is only as it came in: what the base notes of keys and values is not.
    keys = property(lambda self: self._read(0), lambda self, _: None)
    values = property(lambda self: self._read(1), lambda self, _: None)

    def __init__(self, keep, inv_freq=None):
        super().__init__(keep, inv_freq)
        # How many tokens there were when they last settled.
        self.counted = 0

    @property
    def seen(self):
        return 0 if self.raw is None else self.raw[0].shape[1]

    def store(self, key, value):
        new = (key, value)
        self.stored += range(self.seen, self.seen + key.shape[1])
        self.raw = new if self.raw is None else [torch.cat(pair, dim=1) for pair in zip(self.raw, new, strict=True)]
        if not self.recording:
            self._settle()

    def _read(self, side):
        keep, own = self.keep, self.raw[side]
        start, end = keep.sinks, keep.settled(self.counted)
        if end <= start:
            return own
        together = torch.cat([layer.raw[side][:, start:end] for layer in self.row])
        part = (keep.keys, keep.values)[side](together).chunk(len(self.row))[keep.member]
        return torch.cat([own[:, :start], part, own[:, end:]], dim=1)

    def _settle(self):
        self.counted = self.seen


def orthonormal(heads, rank, dim, seed=0):
    """A random basis, fp32 `[heads, rank, dim]`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(heads * dim, heads * dim, generator=generator, dtype=torch.float64)
    return torch.linalg.qr(drawn).Q[:rank].reshape(rank, heads, dim).transpose(0, 1).float().contiguous()
