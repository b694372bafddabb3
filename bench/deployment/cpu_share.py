"""A share of a core for each process, so that several workers on one machine are as independent as slow machines.

Control groups below this process's own one, of version 1 or 2. They need root, and in version 2 the controller cpu for
groups below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000
_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def cpu_share(name: str, cores: float) -> Iterator[Path]:
    """Make a group whose processes get ``cores`` together; the caller adds and ends them. Raises OSError."""
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    group = (_ROOT if is_v2 else _ROOT / "cpu") / _own_path(is_v2=is_v2) / f"decant-bench-{name}"
    quota_us = round(cores * PERIOD_US)
    group.mkdir()
    try:
        if is_v2:
            (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota_us))
        yield group
    finally:
        group.rmdir()


def add(group: Path, pid: int) -> None:
    (group / "cgroup.procs").write_text(str(pid))


def _own_path(*, is_v2: bool) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (not controllers) if is_v2 else ("cpu" in controllers.split(",")):
            return path.lstrip("/")
    return ""
