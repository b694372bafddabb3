"""Runs whose deadline passes while they wait cost no step."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from decant.engine.engine import Engine
from decant.engine.request import Request, StopParams
from decant.protos import worker_pb2 as wire
from decant.worker.decode import admission as decode_admission
from decant.worker.engine_host import EngineHost
from decant.worker.prefill import execution as prefill_execution
from decant.worker.prefill.execution import PrefillExecutor
from decant.worker.prefill.run import PrefillRun
from tests.worker.decode_harness import Device
from tests.worker.test_decode_admission import Queue


async def test_an_expired_run_is_not_added_to_the_decode_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue()
    await queue.push("late", 20, due=time.monotonic() + 60)
    await queue.push("first", 20, 1)
    later = time.monotonic() + 61
    monkeypatch.setattr(decode_admission, "time", SimpleNamespace(monotonic=lambda: later))
    await queue.step()
    assert queue.names == ["first"]
    queue.close()


@pytest.mark.parametrize("remaining_s", [60.0, None])
async def test_an_expired_prompt_is_not_added_to_the_prefill_engine(
    monkeypatch: pytest.MonkeyPatch, remaining_s: float | None
) -> None:
    commands: list[Callable[[Engine], object]] = []
    loop = SimpleNamespace(post=lambda command, then: commands.append(command))
    host = SimpleNamespace(loop=loop, add_queue=lambda _: None)
    request = Request("late", (1, 2, 3), stop=StopParams(max_tokens=4))
    run = PrefillRun(
        wire.Run(), [request], wire.Stopping(), handoff=True, received=100.0, queue_key=0.0, remaining_s=remaining_s
    )
    PrefillExecutor(cast(EngineHost, host))._add_to_engine(run)
    monkeypatch.setattr(prefill_execution, "time", SimpleNamespace(monotonic=lambda: 161.0))
    engine = Engine(Device(16))
    commands[0](engine)
    assert engine.has_work == (remaining_s is None)
