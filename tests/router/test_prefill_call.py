from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import worker_pb2 as wire
from decant.router.workers.prefill_call import PrefillCall
from decant.router.workers.stream_io import StreamBroken
from tests.router.harness import until

REQUEST = wire.PrefillRequest(worker=wire.Peer(id="p"))


class ScriptedCall:
    def __init__(self, *events: wire.PrefillEvent) -> None:
        self._events: list[Any] = [*events, grpc.aio.EOF]

    async def read(self) -> Any:
        return self._events.pop(0)

    def cancel(self) -> None:
        pass


def start(listener: Mock, *events: wire.PrefillEvent) -> PrefillCall:
    return PrefillCall(Mock(Prefill=lambda _: ScriptedCall(*events)), REQUEST, listener)


async def test_a_call_that_the_worker_ends_is_not_broken() -> None:
    listener = Mock()
    start(listener, wire.PrefillEvent(ticket=wire.Ticket()))
    await until(lambda: listener.on_call_ended.called)
    listener.on_ticket.assert_called_once_with(wire.Ticket())
    listener.on_call_ended.assert_called_once_with(None)


@pytest.mark.parametrize("event", ["ticket", "first", "prompt_logprobs", "refused", "failed", "superseded"])
async def test_a_failure_of_the_listener_ends_the_call_as_a_broken_stream(event: str) -> None:
    listener = Mock()
    for method in ("ticket", "first_tokens", "prompt_logprobs", "refused", "failed", "superseded"):
        getattr(listener, f"on_{method}").side_effect = ValueError("unexpected")
    message = wire.PrefillEvent()
    getattr(message, event).SetInParent()
    with capture_logs() as logs:
        start(listener, message)
        await until(lambda: listener.on_call_ended.called)
    ((broken,), _) = listener.on_call_ended.call_args
    assert isinstance(broken, StreamBroken)
    assert str(broken) == "ValueError: unexpected"
    assert [(line["event"], line["worker"]) for line in logs] == [("a task failed", "p")]


async def test_a_closed_call_reports_nothing() -> None:
    listener = Mock()
    start(listener, wire.PrefillEvent(ticket=wire.Ticket())).close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not listener.mock_calls
