"""The process: HTTPS, drain after SIGTERM, and refusals of its settings."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from decant.gateway.main import main
from decant.protos import inference_pb2 as pb
from decant.runtime.connections import certificates
from tests import logging_state
from tests.decant.scripted import Script, delta, finished, serving, started
from tests.e2e.deployment import PATIENCE_S, Process

STREAM = json.dumps({"prompt": "x", "stream": True})


class _Paused:
    """An answer whose second token waits for `goes_on`."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    async def __call__(self, request: pb.GenerateRequest, _: Any) -> AsyncIterator[pb.GenerateStreamResponse]:
        yield started(request)
        yield delta(request, 1, "a")
        await asyncio.to_thread(self.goes_on.wait, PATIENCE_S)
        yield delta(request, 2, "b")
        yield finished(request, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drain_seconds", "status", "last"), [("300", 0, "data: [DONE]"), ("0.1", 1, '"code":"draining"')]
)
def test_a_stream_ends_within_the_drain_or_with_an_error(
    tmp_path: Path, drain_seconds: str, status: int, last: str
) -> None:
    answer, tls = _Paused(), certificates.make(tmp_path / "tls")
    files = ("--https-certificate", str(tls.certificate), "--https-key", str(tls.key))
    with serving(Script(answering=answer)) as address:
        gateway = Process("gateway", "--port", "0", "--address", address, "--drain-seconds", drain_seconds, *files)
        try:
            context = ssl.create_default_context(cafile=str(tls.ca))
            context.check_hostname = False
            host = gateway.until("serving")["address"]
            calling = http.client.HTTPSConnection(host, timeout=PATIENCE_S, context=context)
            calling.request("POST", "/v1/completions", STREAM)
            reply = calling.getresponse()
            assert reply.readline().startswith(b"data: ")
            gateway.ask_to_end(excused=True)
            gateway.until("readiness", state="draining")
            if not status:
                answer.goes_on.set()
            assert last in reply.read().decode().rstrip("\n").rpartition("\n")[2]
        finally:
            answer.goes_on.set()
            ended = gateway.end()
        assert ended == status


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--address", "a:b"], "--address: host:port with a port from 1 to 65535, got a:b"),
        (["--host", "192.0.2.1"], "--port: an address that can be listened on (Cannot assign requested address)"),
        (["--https-certificate", "/none", "--https-key", "/none"], "No such file or directory"),
        (["--ca", "/none"], "/none: No such file or directory"),
        (["--max-requests", "0"], "--max-requests"),
    ],
)
def test_an_unusable_setting_is_refused_in_one_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended, logging_state.restored():
        raise SystemExit(main(["--port", "0", "--log-level", "warning", *arguments]))
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("decant gateway: ")
    assert line in printed
    assert printed.count("\n") == 1
