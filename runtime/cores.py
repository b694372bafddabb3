from __future__ import annotations

import os

from decant.runtime import cgroup


def usable_cores() -> list[int]:
    """Return the cores on which this process may run; a quota of CPU time may allow fewer of them at once."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cores() -> int:
    """Return the number of whole cores whose time this process may use, at least 1."""
    cores, quota = len(usable_cores()), cgroup.cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))
