from __future__ import annotations

import pytest

from bench.request_path import record_path
from tests.build.test_request_page import STOPS

RUNS_WHILE_IDLE = ("engine/engine.py", "Engine.step")
"""A sample of the load is a step of the engine."""


@pytest.mark.slow
async def test_the_path_of_a_request_has_the_stops_of_the_page_about_it() -> None:
    path = await record_path(idle_s=0.1, late_s=0.5)
    assert set(STOPS) - set(path) <= {RUNS_WHILE_IDLE}
    assert len(path) == len(set(path))
