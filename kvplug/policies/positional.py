"""Policies that choose by position alone: a sliding window, and attention sinks with a window.

They never look at the attention, so they cost next to nothing, and they forget whatever leaves the window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvplug.policies.base import PINNED, Policy

POSITIONS = ("compact", "original")


def check_count(name: str, value: int, least: int) -> None:
    """Raises ValueError unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} is not valid: a whole number of tokens, at least {least}, is accepted")


@dataclass(frozen=True)
class Window(Policy):
    """Keeps the last `window` tokens.

    Beltagy et al., "Longformer", 2020 (arXiv:2004.05150). A model that was not trained with a window collapses once its
    first tokens leave it: use `SinkWindow` there.
    """

    window: int

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)

    @property
    def budget(self) -> int:
        return self.window

    def priority(self, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return positions


@dataclass(frozen=True)
class SinkWindow(Policy):
    """Keeps the first `sinks` and the last `window` tokens (StreamingLLM).

    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023 (arXiv:2309.17453). With
    `positions="compact"` distances are counted inside the cache, as in the paper; with "original" they stay.
    """

    sinks: int
    window: int
    positions: str = "compact"

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("window", self.window, 1)
        if self.positions not in POSITIONS:
            raise ValueError(f"positions={self.positions!r} is not known; use one of {', '.join(POSITIONS)}")

    @property
    def budget(self) -> int:
        return self.sinks + self.window

    @property
    def pinned(self) -> int:
        return self.sinks

    @property
    def compact(self) -> bool:
        """Whether the sinks are re-rotated so that they lie right before the window."""
        return self.positions == "compact" and self.sinks > 0

    def priority(self, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return positions + PINNED * (index < self.sinks)
