from __future__ import annotations

import asyncio
from typing import Any

import pytest

import decant
from decant import AsyncClient, Client
from decant.runtime.error_details import Reason, ResumePoint
from tests.decant.scripted import PATIENCE_S, Script, endless_answer, never

ERRORS = [
    decant.InvalidArgument("sampling.top_p", "above 0, to 1", 2.0),
    decant.Unimplemented("SamplingParams.n", 2),
    decant.NotFound("model", "unknown"),
    decant.AlreadyExists("r"),
    decant.QueueFull(4, retry_after=0.01),
    decant.Aborted(Reason.WORKERS_LOST, "lost", resume=ResumePoint(0, 5)),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_status_raises_the_matching_exception(address: str, script: Script, error: Any) -> None:
    script.refusal = error
    raised = []
    with Client(address) as client:
        for ask in (client.generate, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(type(error)) as caught:
                ask("x")
            raised.append(caught.value)
    async with AsyncClient(address) as awaiting:
        with pytest.raises(type(error)) as caught:
            await awaiting.generate("x")
        raised.append(caught.value)
        with pytest.raises(type(error)) as caught:
            async for _ in awaiting.stream("x"):
                pass
        raised.append(caught.value)
    assert all(one.detail == error.detail for one in raised)


def test_an_unreachable_server_is_unavailable() -> None:
    with Client("127.0.0.1:1", resume_seconds=0) as client, pytest.raises(decant.Unavailable):
        client.generate("x", timeout=PATIENCE_S)


def test_timeout_is_the_deadline_of_the_request(client: Client, script: Script) -> None:
    script.answering = never
    with pytest.raises(decant.DeadlineExceeded):
        client.generate("x", timeout=0.3)
    client.stream("x", timeout=40).close()
    script.answering = None
    list(client.stream("x", timeout=40))
    assert script.time_left is not None
    assert 0 < script.time_left < 45
    for seconds in (9.2e9, 1e300):
        assert client.generate("x", timeout=seconds).text == "abc"


@pytest.mark.slow
async def test_a_deadline_during_a_stream_has_the_reason_deadline_exceeded(address: str, script: Script) -> None:
    script.answering = endless_answer
    errors = []
    with Client(address) as client:
        for ask in (lambda: list(client.stream("x", timeout=0.5)), lambda: client.generate("x", timeout=0.5)):
            with pytest.raises(decant.DeadlineExceeded) as caught:
                await asyncio.to_thread(ask)
            errors.append(caught.value)
    async with AsyncClient(address) as awaiting:
        with pytest.raises(decant.DeadlineExceeded) as caught:
            async for _ in awaiting.stream("x", timeout=0.5):
                pass
        errors.append(caught.value)
        with pytest.raises(decant.DeadlineExceeded) as caught:
            await awaiting.generate("x", timeout=0.5)
        errors.append(caught.value)
    assert {error.reason for error in errors} == {Reason.DEADLINE_EXCEEDED}
    assert {str(error) for error in errors} == {"the deadline of 0.5 s has passed"}
