from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def busy(document: Mapping[str, Any]) -> str:
    """Return a warning if the load average exceeds the cores, else an empty text."""
    load, cores = document["load_average"], document["cores"]
    if load <= cores + 0.5:
        return ""
    return f"Load average {load:.1f} on {cores} cores: other processes ran meanwhile, so times are too long."
