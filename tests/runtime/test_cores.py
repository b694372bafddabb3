import os

import pytest

from decant.runtime.cores import usable_cores


def test_cores_are_those_of_the_affinity_mask() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this platform has no affinity masks")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == [min(before)]
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(("count", "cores"), [(3, [0, 1, 2]), (None, [0])])
def test_without_affinity_masks_all_cores_are_usable(
    monkeypatch: pytest.MonkeyPatch, count: int | None, cores: list[int]
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == cores
