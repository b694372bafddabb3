"""Metadata that llm-d's endpoint picker adds to a call, with the deprecated names of the Gateway API extension."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from decant.router.api.auth import Metadata
from decant.runtime.errors import InvalidArgument

OBJECTIVE = "x-llm-d-inference-objective"
FAIRNESS_ID = "x-llm-d-inference-fairness-id"
TTL = "x-llm-d-inference-ttl"
MODEL = "x-llm-d-model-name-rewrite"

_OLD_NAMES = {
    "x-gateway-inference-objective": OBJECTIVE,
    "x-gateway-inference-fairness-id": FAIRNESS_ID,
    "x-gateway-model-name-rewrite": MODEL,
}
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_DURATION = re.compile(rf"\+?(?:{_PART.pattern})+")


@dataclass(frozen=True, slots=True)
class CallMetadata:
    model: str = ""
    """Empty: the first that the tenant may use."""
    priority: int = 0
    fairness_id: str = ""
    """For the log: credentials alone determine the tenant."""
    queue_s: float | None = None
    """Seconds that the request may wait for its turn; None: no limit of its own."""


def call_metadata(metadata: Metadata, objectives: Mapping[str, int]) -> CallMetadata:
    """Read a call's metadata; ``objectives`` are priorities by name. Raises InvalidArgument."""
    values: dict[str, str] = {}
    for key, value in metadata:
        name = _OLD_NAMES.get(key, key)
        if isinstance(value, str) and (name == key or name not in values):  # the new name counts
            values[name] = value
    return CallMetadata(
        model=values.get(MODEL, ""),
        priority=_priority(values[OBJECTIVE], objectives) if values.get(OBJECTIVE) else 0,
        fairness_id=values.get(FAIRNESS_ID, ""),
        queue_s=_seconds(values[TTL]) if values.get(TTL) else None,
    )


def _priority(objective: str, objectives: Mapping[str, int]) -> int:
    if objective in objectives:
        return objectives[objective]
    try:
        return int(objective)
    except ValueError:
        known = ", ".join(objectives) or "none"
        limit = f"an objective of this router's --objectives ({known}), or a priority as a whole number"
        raise InvalidArgument(OBJECTIVE, limit, objective) from None


def _seconds(duration: str) -> float:
    if _DURATION.fullmatch(duration):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(duration))
        if seconds > 0:
            return seconds
    raise InvalidArgument(TTL, "a duration above 0 in Go's form, such as 1500ms", duration)
