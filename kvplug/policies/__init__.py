"""The eviction policies by name. Adding one is a file and a line here."""

from __future__ import annotations

from kvplug.policies.base import Policy
from kvplug.policies.positional import SinkWindow, Window

POLICIES: dict[str, type[Policy]] = {"window": Window, "streaming": SinkWindow}

__all__ = ["POLICIES", "Policy", "SinkWindow", "Window"]
