"""Limits of control groups as containers see them, on files of each version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from decant.runtime import cgroup, cores

MIB = 1 << 20
Files = Callable[[str, Mapping[str, str]], None]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    monkeypatch.setattr(cgroup, "_OWN", own)
    monkeypatch.setattr(cgroup, "_ROOT", root)
    monkeypatch.setattr(cores, "usable_cores", lambda: list(range(16)))

    def write(groups: str, contents: Mapping[str, str]) -> None:
        if groups:
            own.write_text(groups)
        for name, text in contents.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)

    return write


V1 = "9:memory:/pods/p\n4:cpu,cpuacct:/pods/p\n1:name=systemd:/pods/p\n0::/\n"


@pytest.mark.parametrize(
    ("groups", "contents", "available"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 16),
        ("", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "300000 100000", "cpu.max": "max 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "max 100000"}, 2),
        ("0::/docker/of-the-host\n", {"cpu.max": "400000 100000"}, 4),
        ("0::/../..\n", {"cpu.max": "400000 100000"}, 4),
        (V1, {"cpu,cpuacct/pods/p/cpu.cfs_quota_us": "200000", "cpu,cpuacct/pods/p/cpu.cfs_period_us": "50000"}, 4),
        (V1, {"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        (V1, {"cpu/pods/p/cpu.cfs_quota_us": "-1", "cpu/pods/p/cpu.cfs_period_us": "100000"}, 16),
        (V1, {}, 16),
        ("", {}, 16),
    ],
)
def test_no_more_cores_than_the_groups_have_time_for(
    files: Files, groups: str, contents: Mapping[str, str], available: int
) -> None:
    files(groups, contents)
    assert cores.available_cores() == available


V1_MEMORY = {"memory/pods/p/memory.limit_in_bytes": f"{512 * MIB}", "memory/pods/p/memory.usage_in_bytes": f"{MIB}"}


@pytest.mark.parametrize(
    ("groups", "contents", "available"),
    [
        ("0::/\n", {"memory.max": f"{512 * MIB}\n", "memory.current": f"{12 * MIB}\n"}, 500),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, None),
        ("0::/\n", {"memory.max": f"{MIB}", "memory.current": f"{2 * MIB}"}, 0),
        (
            "0::/a/b\n",
            {
                "a/b/memory.max": f"{64 * MIB}",
                "a/b/memory.current": f"{MIB}",
                "a/memory.max": f"{48 * MIB}",
                "a/memory.current": f"{8 * MIB}",
            },
            40,
        ),
        (
            "0::/\n",
            {
                "memory.max": f"{512 * MIB}",
                "memory.current": f"{112 * MIB}",
                "memory.stat": f"anon 5\ninactive_file {100 * MIB}\n",
            },
            500,
        ),
        (V1, V1_MEMORY, 511),
        (V1, {**V1_MEMORY, "memory/pods/p/memory.stat": f"cache 9\ntotal_inactive_file {MIB}\n"}, 512),
        (V1, {}, None),
        ("", {}, None),
    ],
)
def test_the_memory_that_the_groups_grant(
    files: Files, groups: str, contents: Mapping[str, str], available: int | None
) -> None:
    files(groups, contents)
    assert cgroup.available_memory() == (None if available is None else available * MIB)
