"""CPU cores of this process, on any platform."""

from __future__ import annotations

import os


def usable_cores() -> list[int]:
    """Cores that this process may run on: those of its affinity mask, or all where the platform has no such mask."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
