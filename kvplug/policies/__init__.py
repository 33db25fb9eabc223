"""The eviction policies by name. Adding one is a file and a line here."""

from __future__ import annotations

from kvplug.policies.base import Policy
from kvplug.policies.expected import ExpectedAttention
from kvplug.policies.h2o import HeavyHitters
from kvplug.policies.keydiff import KeyDiff
from kvplug.policies.knorm import KeyNorm
from kvplug.policies.positional import SinkWindow, Window
from kvplug.policies.scored import Scored
from kvplug.policies.snapkv import Votes
from kvplug.policies.tova import NewestQuery

POLICIES: dict[str, type[Policy]] = {
    "window": Window,
    "streaming": SinkWindow,
    "h2o": HeavyHitters,
    "snapkv": Votes,
    "tova": NewestQuery,
    "keydiff": KeyDiff,
    "knorm": KeyNorm,
    "expected_attention": ExpectedAttention,
}

__all__ = [
    "POLICIES",
    "ExpectedAttention",
    "HeavyHitters",
    "KeyDiff",
    "KeyNorm",
    "NewestQuery",
    "Policy",
    "Scored",
    "SinkWindow",
    "Votes",
    "Window",
]
