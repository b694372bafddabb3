"""Limits of this process's control groups, version 2 or 1: its own group's and those of all groups around it.

A container often sees its own group as the root of the mounted hierarchy, while /proc/self/cgroup may name its path on
the host. Of such a path only the groups that exist here are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def cpu_quota() -> float | None:
    """Return the CPU time that the groups grant, in cores; None without a limit."""
    quotas = [quota for group in _groups("cpu") if (quota := _cpu_quota(group)) is not None]
    return min(quotas, default=None)


def available_memory() -> int | None:
    """Return the bytes that the groups grant beyond those in use; None without a limit. Page cache counts as free."""
    available = [left for group in _groups("memory") if (left := _available_memory(group)) is not None]
    return min(available, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Yield this process's group of a controller and those around it, whether or not they exist here."""
    for line in _text(_OWN).splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = _mount(controllers, controller)
        own = mount if ".." in path.split("/") else mount / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(mount))


def _mount(controllers: str, controller: str) -> Path:
    if not controllers:
        return _ROOT
    together = _ROOT / controllers  # such as cpu,cpuacct
    return together if together.is_dir() else _ROOT / controller


def _cpu_quota(group: Path) -> float | None:
    words = _text(group / "cpu.max").split() or [
        *_text(group / "cpu.cfs_quota_us").split(),
        *_text(group / "cpu.cfs_period_us").split(),
    ]
    try:
        quota, period = map(int, words)
    except ValueError:  # "max", or no such group
        return None
    return quota / period if quota > 0 and period > 0 else None  # -1: no limit


def _available_memory(group: Path) -> int | None:
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            left = int(_text(group / limit)) - int(_text(group / used))
        except ValueError:  # "max", or no such group
            continue
        words = _text(group / "memory.stat").split()
        counts = dict(zip(words[::2], words[1::2], strict=False))
        return max(0, left + int(counts.get(cache, 0)))
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
