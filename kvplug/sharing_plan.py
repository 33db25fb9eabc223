"""Which layers of a model may share, as calibration found it: written to a file once and read for each cache.

Must never share in a model what was found for another.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvplug import files
from kvplug.fingerprint import Fingerprint, differences, fingerprint

FORMAT = "kvplug sharing plan"


@dataclass(frozen=True)
class SharingPlan:
    """What `calibrate_sharing` found.

    Attributes:
        groups: layers that share, the owner of each group first.
        share: the part of the full-attention layers that store nothing.
        model: which model it was found for.
        report: what was measured on the way.
    """

    groups: list[list[int]]
    share: float
    model: Fingerprint
    report: dict[str, object] = field(default_factory=dict)

    def save(self, path: files.Path) -> None:
        """Writes the plan as JSON, over what is there.

        Raises:
            OSError: the file can't be written.
        """
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: files.Path) -> SharingPlan:
        """The plan that `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: it holds no plan.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise ValueError(f"it is not of the format {FORMAT!r}")
            plan = cls(**found)
            differences(plan.model, plan.model)  # raises for what is no fingerprint
            if not isinstance(plan.groups, list):
                raise TypeError(f"groups={plan.groups!r} is no list")
            return plan
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"plan={str(path)!r} can't be used ({type(error).__name__}: {error}); a file that "
                "kvplug.calibrate_sharing wrote is accepted"
            ) from error

    @classmethod
    def of(cls, plan: SharingPlan | files.Path) -> SharingPlan:
        """A plan from itself, or from the file of one.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(plan, str | Path):
            plan = cls.load(plan)
        if not isinstance(plan, SharingPlan):
            raise ValueError(
                f"plan={plan!r} is not accepted; what kvplug.calibrate_sharing returned, or the file that it wrote, is"
            )
        return plan

    def groups_for(self, model: object) -> list[list[int]]:
        """The groups, for a model or config.

        Raises:
            ValueError: the plan was found for another one.
        """
        told = differences(self.model, fingerprint(model))
        if told:
            raise ValueError(f"plan was found for another model: {'; '.join(told)}; one of this model is accepted")
        return self.groups
