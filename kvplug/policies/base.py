"""Which tokens stay: the protocol of a policy.

A policy only ranks tokens: it never moves them. Ranks of empty slots and of padding, at position -1, are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Above every logical position, so that a pinned token outranks any other.
PINNED = 1 << 40


@dataclass(frozen=True)
class Policy:
    """Keeps at most `budget` tokens a layer. Subclasses are frozen dataclasses that have it and rank the candidates.

    `needs_queries` says whether the policy must see the attention; positional ones need not.
    """

    @property
    def pinned(self) -> int:
        """Leading slots that are never given up: they hold a row's first `pinned` real tokens."""
        return 0

    needs_queries = False

    def priority(self, positions: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """The rank of each candidate: the `budget` highest stay.

        Args:
            positions: int64 `[rows, heads, candidates]`, logical position of each candidate.
            index: int64, same shape: a candidate's number among the real tokens of its row, or the number of its slot
                (slots below `pinned` hold just those tokens).

        Returns:
            int64 of the same shape, for real tokens distinct, not negative and below `2 * PINNED`.
        """
        raise NotImplementedError
