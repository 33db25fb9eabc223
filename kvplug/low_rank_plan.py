"""The directions that keys and values of a model's layers mostly lie in: found once, kept in a file.

Must never be used with another model than it was found for.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kvplug import files
from kvplug.fingerprint import Fingerprint, differences, fingerprint

FORMAT = "kvplug low-rank plan"
ACCEPTED = "a file that kvplug.calibrate_low_rank wrote is accepted"
SIDES = ("keys", "values")


@dataclass(frozen=True, eq=False)
class LowRankPlan:
    """What `calibrate_low_rank` found.

    Attributes:
        groups: layers whose keys and values are written in one basis, neighbours.
        rank: the largest part of the directions that can be kept.
        bases: fp32 `[layers * kv_heads, directions, head_dim]` by side and group, for "keys" and "values": orthonormal
            over heads and channels together, the loudest direction first.
        model: which model it was found for.
    """

    groups: list[list[int]]
    rank: float
    bases: dict[str, list[torch.Tensor]]
    model: Fingerprint

    def save(self, path: files.Path) -> None:
        """Writes the plan, over what is there.

        Raises:
            OSError: the file can't be written.
        """
        tensors = {f"{side}.{i}": x for side in SIDES for i, x in enumerate(self.bases[side])}
        files.write(path, tensors, {"groups": self.groups, "rank": self.rank, "model": self.model}, FORMAT)

    @classmethod
    def load(cls, path: files.Path) -> LowRankPlan:
        """The plan that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds no plan, or is damaged.
        """
        header, tensors = files.read(path, FORMAT, ACCEPTED)
        groups = header["groups"]
        bases = {side: [tensors[f"{side}.{i}"].clone() for i in range(len(groups))] for side in SIDES}
        return cls(groups, header["rank"], bases, header["model"])

    @classmethod
    def of(cls, plan: LowRankPlan | files.Path) -> LowRankPlan:
        """A plan from itself, or from the file of one.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(plan, str | Path):
            plan = cls.load(plan)
        if not isinstance(plan, LowRankPlan):
            raise ValueError(
                f"plan={plan!r} is not accepted; what kvplug.calibrate_low_rank returned, or the file that it wrote, is"
            )
        return plan

    def check_model(self, model: object) -> None:
        """Raises ValueError where the plan was found for another model or config."""
        told = differences(self.model, fingerprint(model))
        if told:
            raise ValueError(f"plan was found for another model: {'; '.join(told)}; one of this model is accepted")

    def directions(self, side: str, group: int, part: float) -> int:
        """How many directions of a group's side a part of them is: a multiple of 8 where there are so many."""
        heads, _, dim = self.bases[side][group].shape
        count = round(part * heads * dim)
        return max(count // 8 * 8 if count >= 8 else count, 1)

    def basis(self, side: str, group: int, part: float) -> torch.Tensor:
        """The first directions of a group, in memory of their own: `[layers * kv_heads, directions, head_dim]`."""
        return self.bases[side][group][:, : self.directions(side, group, part)].clone()
