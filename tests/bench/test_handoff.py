"""Two processes move caches and step beside it; every figure that the report speaks of is there and makes sense."""

import json
import math
import subprocess
import sys

import pytest

import models


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bench.handoff", "--model", str(models.path()), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_steps_are_watched_alone_and_beside_each_move() -> None:
    ended = bench("--mib", "1", "--runs", "2", "--seconds", "0.2", "--prompts", "1", "--json", "-")
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert len(result["bare_s"]) == len(result["handoff_s"]) == 2
    for end in ("giver", "taker"):
        assert set(result["all_at_once"][end]["step_ms"]) == {"alone", "bare", "handoff"}
    ratios = [result["ratio"], *(ratio for ends in result["step_slower"].values() for ratio in ends.values())]
    assert len(ratios) == 5
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in ratios)


def test_a_cache_longer_than_any_sequence_of_the_model_is_refused() -> None:
    ended = bench("--mib", "1024")
    assert ended.returncode == 1
    assert "mib" in ended.stderr
    assert "1024" in ended.stderr
