"""Which layers are stored together, and in which codecs, for each way to do so.

Says no where a way does not fit a model. Must never touch a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvplug.codecs import Codec
from kvplug.codecs.joint import LowRank, Merged
from kvplug.low_rank_plan import LowRankPlan

# Layers that are stored together, and the codecs of keys and values over the heads of all of them.
Joined = tuple[list[int], Codec, Codec]


class Joining:
    """A way to store layers together."""

    def groups(self, model: object, full: Sequence[int], codecs: tuple[Codec, Codec]) -> list[Joined]:
        """The groups, for a model or config.

        Args:
            full: the full-attention layers, by their index, in order.
            codecs: how keys and values are to be written.

        Raises:
            ValueError: the way does not fit the model.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Merging(Joining):
    """Pairs of neighbours from `start` on, each as one direction and two lengths (see `MiniCache`)."""

    start: int | None = None
    group_size: int = 32
    distinct: int = 2

    def __post_init__(self):
        Merged(Codec(), self.group_size, self.distinct)  # raises for what is not valid
        start = self.start
        if start is not None and (isinstance(start, bool) or not isinstance(start, int) or start < 0):
            raise ValueError(
                f"start={start!r} is not valid; the index of a layer, or None for half of them, is accepted"
            )

    def groups(self, model: object, full: Sequence[int], codecs: tuple[Codec, Codec]) -> list[Joined]:
        half = max(min(len(full) // 2, len(full) - 2), 0)
        start = full[half] if self.start is None else self.start
        deep = [i for i in full if i >= start]
        if len(deep) < 2:
            raise ValueError(
                f"start={self.start!r} leaves {len(deep)} of the full-attention layers {', '.join(map(str, full))}; "
                f"{f'up to {full[-2]}' if len(full) > 1 else 'a model that has two of them'} is accepted"
            )
        sides = [Merged(codec.tokenwise(), self.group_size, self.distinct) for codec in codecs]
        return [(deep[i : i + 2], *sides) for i in range(0, len(deep) - 1, 2)]


@dataclass(frozen=True)
class Projecting(Joining):
    """The groups of a plan, values and perhaps keys as coordinates in its bases (see `LowRankCache`)."""

    plan: LowRankPlan
    rank: float
    keys: float | None = None

    def __post_init__(self):
        for name, part in (("rank", self.rank), ("keys", self.keys)):
            if name == "keys" and part is None:
                continue
            if isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= self.plan.rank:
                raise ValueError(
                    f"{name}={part!r} is not valid; above 0 and up to the plan's {self.plan.rank} is accepted"
                )

    def groups(self, model: object, full: Sequence[int], codecs: tuple[Codec, Codec]) -> list[Joined]:
        self.plan.check_model(model)
        return [(layers, *self._codecs(i, len(layers), codecs)) for i, layers in enumerate(self.plan.groups)]

    def _codecs(self, group: int, members: int, codecs: tuple[Codec, Codec]) -> list[Codec]:
        parts = zip(("keys", "values"), codecs, (self.keys, self.rank), strict=True)
        return [
            codec if part is None else LowRank(codec, self.plan.basis(side, group, part), members)
            for side, codec, part in parts
        ]
