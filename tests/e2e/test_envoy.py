"""deploy/envoy/envoy.yaml, run by a real Envoy in front of real routers."""

from __future__ import annotations

import http.client
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from decant import Client, GenerationState, Tls, models
from decant.protos import inference_pb2 as pb
from tests.e2e.deployment import PATIENCE_S, Deployment, Process, deployment
from tests.e2e.envoy import ENVOY_CONFIGS, envoy, needs_envoy
from tests.runtime.certificates import Certificates

pytestmark = [pytest.mark.slow, needs_envoy]

PROMPT = "def total(values):\n    result = 0\n"
LONG: Any = {"max_tokens": 600, "temperature": 0, "ignore_eos": True, "timeout": PATIENCE_S}
CALL, STREAM = "/decant.v1.InferenceService/Generate", "/decant.v1.InferenceService/GenerateStream"
IDLE_LIMIT_S = 5
KEEPALIVE_S = 0.5
STREAM_IDLE_TIMEOUT = "SI"
"""Envoy's flag of a response that it cut."""
TRAILERS = 0x80
"""Flag of gRPC-Web's last frame."""
PING, GOAWAY = 6, 7
"""Types of frames of HTTP/2. After GOAWAY a connection has no new streams."""


@pytest.fixture(scope="module")
def running() -> Iterator[Deployment]:
    settings = ("--max-active", "1", "--resume-grace-ms", "60000", "--stream-keepalive-seconds", str(KEEPALIVE_S))
    with deployment(routers=3, router=settings) as made:
        yield made
        for worker in made.workers:  # one keeps an ended run of the killed router for a lease, and would drain as long
            worker.process.kill()


def test_calls_go_to_each_router_in_turn(running: Deployment) -> None:
    with envoy(running.addresses) as address, Client(address) as client:
        called: set[str] = set()
        ends = time.monotonic() + PATIENCE_S
        while len(called) < 3:  # each after its first health check
            assert time.monotonic() < ends, called
            called.add(client.server_info().router_id)


def test_a_browsers_call_is_answered_and_allowed(running: Deployment) -> None:
    with envoy(running.addresses) as address:
        connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        connection.request("OPTIONS", STREAM, headers=asked)
        preflight = connection.getresponse()
        preflight.read()
        assert preflight.getheader("access-control-allow-origin") == "https://page.example"
        assert "x-grpc-web" in (preflight.getheader("access-control-allow-headers") or "")

        message = pb.GenerateRequest(prompt=PROMPT, stopping=pb.StoppingParams(max_tokens=8)).SerializeToString()
        headers = {"Content-Type": "application/grpc-web+proto", "X-Grpc-Web": "1", "Origin": "https://page.example"}
        connection.request("POST", STREAM, struct.pack(">BI", 0, len(message)) + message, headers)
        *events, (flag, trailers) = frames(connection.getresponse().read())
    assert (flag, b"grpc-status:0" in trailers) == (TRAILERS, True)
    responses = [pb.GenerateStreamResponse.FromString(content) for _, content in events]
    responses = [response for response in responses if not response.HasField("waiting")]
    assert responses[0].HasField("started")
    assert responses[-1].usage.completion_tokens == 8


def frames(body: bytes) -> Iterator[tuple[int, bytes]]:
    while body:
        flag, length = struct.unpack_from(">BI", body)
        yield flag, body[5 : 5 + length]
        body = body[5 + length :]


def test_clients_speak_tls_to_envoy_and_envoy_mutual_tls_to_routers(running: Deployment, tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    text = (ENVOY_CONFIGS / "tls.yaml").read_text()
    for name, file in (
        ("/certificates/tls.crt", made.certificate),
        ("/certificates/tls.key", made.key),
        ("/certificates/client.crt", made.certificate),
        ("/certificates/client.key", made.key),
        ("/certificates/ca.crt", made.ca),
    ):
        assert name in text
        text = text.replace(name, str(file))
    proof = ("--tls-certificate", str(made.certificate), "--tls-key", str(made.key), "--tls-client-ca", str(made.ca))
    arguments = ("--port", "0", "--redis-url", running.redis.url, "--models", str(models.path()), *proof)
    with Process("router", *arguments) as router:
        router.until("readiness", state="ready")
        address = router.until("serving")["address"]
        with (
            envoy([address], tls=yaml.safe_load(text), ca=made.ca) as proxy,
            Client(proxy, tls=Tls(ca=str(made.ca))) as client,
        ):
            assert client.generate(PROMPT, max_tokens=8).usage.completion_tokens == 8


def test_an_idle_limit_cuts_no_stream_that_waits_and_loses_no_request(running: Deployment, tmp_path: Path) -> None:
    """The client of an answer in one message attaches to its request again, which runs once and is charged once."""
    log = tmp_path / "access.log"
    limit: Any = {"stream_idle_timeout": f"{IDLE_LIMIT_S}s", "access_log": [access_log(log)]}
    with (
        Client(running.addresses[0]) as direct,
        envoy(running.addresses[:1], manager=limit) as address,
        Client(address) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        short = LONG | {"max_tokens": 16}
        undisturbed = direct.generate(PROMPT, **short).text
        with blocked(direct) as block:
            streamed = client.stream(PROMPT, request_id="streams", **short)
            first = threads.submit(lambda: [delta.text for delta in streamed])
            ends = time.monotonic() + PATIENCE_S
            while streamed.waiting is None:  # it began to wait before the other
                assert time.monotonic() < ends, "nothing says that it waits"
                block()
            assert streamed.waiting.state is GenerationState.QUEUED
            second = threads.submit(client.generate, PROMPT, request_id="waits", **short)
            while CALL not in cut_calls(log):
                block()
        assert "".join(first.result(PATIENCE_S)) == undisturbed
        assert streamed.resumed_at == []
        answer = second.result(PATIENCE_S)
        assert answer.text == undisturbed
        assert STREAM not in cut_calls(log)
        assert (answer.receipt.attempts, answer.usage.completion_tokens) == (1, 16)
        states = [transition.state for transition in direct.generation("waits").transitions]
        assert len(states) == len(set(states)), states


@contextmanager
def blocked(client: Client) -> Iterator[Callable[[], None]]:
    """Keep the router's one slot taken: each call of what this yields waits for one request, while the next one waits
    for its turn, before all that are less urgent.
    """
    with ExitStack() as stack:

        def begin() -> Any:
            return iter(stack.enter_context(client.stream(PROMPT, priority=1000, **LONG)))

        turns = deque([begin(), begin()])
        next(turns[0])

        def block() -> None:
            turns.append(begin())
            for _ in turns.popleft():
                pass

        yield block


def cut_calls(log: Path) -> list[str]:
    """Methods of the calls that an idle limit has ended, of a log of `access_log`."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [line.split()[-1] for line in lines if line.split()[0] == STREAM_IDLE_TIMEOUT]


def access_log(file: Path) -> Any:
    kind = "type.googleapis.com/envoy.extensions.access_loggers.file.v3.FileAccessLog"
    text = {"text_format_source": {"inline_string": "%RESPONSE_FLAGS% %REQ(:PATH)%\n"}}
    return {"name": "access", "typed_config": {"@type": kind, "path": str(file), "log_format": text}}


def test_streams_outlive_a_router_that_drains_and_one_that_is_killed(running: Deployment) -> None:
    with envoy(running.addresses) as address, Client(address) as client, ThreadPoolExecutor(1) as threads:
        undisturbed = client.generate(PROMPT, **LONG).text
        frames_of_drain = threads.submit(frame_types, running.address)
        for end in (Process.ask_to_end, Process.kill):
            with ExitStack() as stack:
                streams = [iter(stack.enter_context(client.stream(PROMPT, **LONG))) for _ in running.routers]
                texts = [next(stream).text for stream in streams]
                ended = running.routers.pop(0)
                end(ended)
                texts = [
                    first + "".join(delta.text for delta in rest) for first, rest in zip(texts, streams, strict=True)
                ]
            assert texts == [undisturbed] * len(texts)
            assert client.generate(PROMPT, max_tokens=8, timeout=PATIENCE_S).usage.completion_tokens == 8
            ended.end()
        assert GOAWAY in frames_of_drain.result(PATIENCE_S), "a proxy opens no stream on a connection that drains"


def frame_types(address: str) -> set[int]:
    """Types of all frames of a connection without streams, until the server closes it."""
    host, _, port = address.rpartition(":")
    types: set[int] = set()
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as incoming:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
        while head := incoming.read(9):
            types.add(head[3])
            content = incoming.read(int.from_bytes(head[:3]))
            if head[3] == PING and not head[4]:
                connection.sendall(head[:4] + b"\1" + head[5:] + content)
    return types
