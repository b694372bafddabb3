"""What the tests of the kernels must not do silently."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import gpu
from tests.engine.cuda import conftest

KERNELS = Path(__file__).parents[3] / "engine/cuda"


@pytest.mark.parametrize("place", ["proc/driver/nvidia/version", "dev/nvidia0", "dev/dxg"])
def test_a_gpu_is_seen_by_its_driver_or_its_device(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    assert not gpu.is_present()
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).touch()
    assert gpu.is_present()


def test_kernels_are_interpreted_on_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu.device_type() == "cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(AssertionError, match="set TRITON_INTERPRET=1"):
        gpu.device_type()


def test_shards_of_the_tests_have_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    for at in range(3):
        monkeypatch.setenv("DECANT_TEST_SHARD", f"{at}/3")
        items: list[Any] = list(range(10))
        conftest.pytest_collection_modifyitems(items)
        found += items
    assert sorted(found) == list(range(10))
    monkeypatch.delenv("DECANT_TEST_SHARD")
    items = [1, 2]
    conftest.pytest_collection_modifyitems(items)
    assert items == [1, 2]


def test_every_launch_names_its_warps_and_stages() -> None:
    """Another version of triton may have other defaults, and pipeline other loads."""
    launches = 0
    for module in KERNELS.glob("*.py"):
        for call in ast.walk(ast.parse(module.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Subscript) and call.keywords:
                kernel = ast.unparse(call.func)
                if not kernel.startswith(("kernels.", "layer_kernels.")):
                    continue
                names = {keyword.arg for keyword in call.keywords}
                assert {"num_warps", "num_stages"} <= names, f"{module.name}: {kernel}"
                launches += 1
    assert launches >= 8
