from __future__ import annotations

from argparse import Namespace

import pytest

from bench import store


@pytest.mark.slow
async def test_each_running_stream_is_written_once_in_each_interval() -> None:
    args = Namespace(streams=8, routers=2, workers=2, tokens=400, prompt_bytes=10, flush_ms=200, seconds=2.0)
    found = await store.measure(args)
    assert found["writes_per_s"] == pytest.approx(8 / 0.2, abs=8)  # an end is written at once, beside the interval
    assert found["scripts_per_s"] > found["writes_per_s"]
    assert found["cores"] > 0
    assert found["bytes_per_running_request"] > 500
