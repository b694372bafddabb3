from __future__ import annotations

import os
from pathlib import Path

from decant.runtime import cgroup

_MEMINFO = Path("/proc/meminfo")


def available_memory() -> int:
    """Return the bytes that this machine has free and this process's control groups grant."""
    machine, granted = _machine_memory(), cgroup.available_memory()
    return machine if granted is None else min(machine, granted)


def _machine_memory() -> int:
    try:
        words = _MEMINFO.read_text().split()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return int(words[words.index("MemAvailable:") + 1]) * 1024
