"""What a call brings beside its body, its limits, and OpenAI's object for each error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import decant
from decant.gateway.app import Gateway, Limits
from decant.gateway.settings import GatewaySettings
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from tests.decant.scripted import Script, endless_answer
from tests.gateway.asgi import HttpCall, Reply, call

COMPLETIONS = "/v1/completions"
BODY: Any = {"prompt": "x"}


def rest(reply: Reply) -> tuple[Any, ...]:
    return reply.status, reply.error["type"], reply.error["code"], reply.error["param"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            decant.InvalidArgument("stopping.max_tokens", "from 1", 0),
            (400, "invalid_request_error", "invalid_value", "max_tokens"),
        ),
        (
            decant.InvalidArgument("response.prompt_logprobs", "less", 9),
            (400, "invalid_request_error", "invalid_value", "logprobs"),
        ),
        (
            decant.InvalidArgument("prompt", "short", 9, reason=decant.Reason.PROMPT_TOO_LONG),
            (400, "invalid_request_error", "context_length_exceeded", "prompt"),
        ),
        (decant.Unimplemented("echo"), (400, "invalid_request_error", "unsupported_parameter", "echo")),
        (decant.NotFound("model", "x"), (404, "invalid_request_error", "model_not_found", "model")),
        (decant.AlreadyExists("x"), (409, "invalid_request_error", "request_id_reused", "Idempotency-Key")),
        (decant.Unauthenticated(), (401, "authentication_error", "invalid_api_key", None)),
        (decant.PermissionDenied("model x"), (403, "permission_error", "not_allowed", None)),
        (
            decant.QuotaExceeded("t", "in_flight", 1, 2, retry_after=1.2),
            (429, "rate_limit_error", "rate_limit_exceeded", None),
        ),
        (decant.QueueFull(5, retry_after=1.2), (503, "server_error", "queue_full", None)),
        (
            decant.Unavailable(decant.Reason.NO_WORKER, "none", retry_after=1.2),
            (503, "server_error", "no_worker", None),
        ),
        (decant.DeadlineExceeded(), (504, "server_error", "deadline_exceeded", None)),
        (decant.Cancelled(), (409, "invalid_request_error", "cancelled", None)),
        (decant.Aborted(decant.Reason.SUPERSEDED, "newer"), (409, "invalid_request_error", "superseded", None)),
        (decant.Internal(), (500, "server_error", "internal", None)),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_error_of_a_router_has_openais_object(
    gateway: Gateway, script: Script, error: Any, expected: Any
) -> None:
    script.refusal = error
    reply = await call(gateway, COMPLETIONS, BODY)
    assert rest(reply) == expected
    assert len(script.requests) == 1, "clients of HTTP repeat a refused call themselves"
    assert reply.headers.get("retry-after") == ("2" if reply.status in (429, 503) else None)
    assert (reply.headers.get("x-should-retry") == "false") == (reply.status in (409, 504))
    has_field = expected[3] is not None and (error.detail.violation or reply.status == 409)
    assert not has_field or reply.error["message"].startswith(f"{expected[3]}: ")


async def test_a_router_that_is_away_is_an_unavailable_service(script: Script) -> None:
    async with decant.AsyncClient("127.0.0.1:1", resume_seconds=0) as client:
        reply = await call(Gateway(client, Limits()), COMPLETIONS, BODY)
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "service_unavailable", "1")
        assert (await call(Gateway(client, Limits()), "/health")).status == 503


async def test_the_key_of_a_call_is_the_routers_credential(gateway: Gateway, script: Script) -> None:
    await call(gateway, COMPLETIONS, BODY, Authorization="Bearer one")
    await call(gateway, COMPLETIONS, BODY, Authorization="bearer two")
    await call(gateway, COMPLETIONS, BODY)
    brought = [secrets for method, secrets in script.authorized if method == "Generate"]  # not of health checks
    assert brought == [["Bearer one"], ["Bearer two"], []]
    for wrong in ("Basic abc", "Bearer ", "Bearer two words"):
        reply = await call(gateway, COMPLETIONS, BODY, Authorization=wrong)
        assert rest(reply) == (401, "authentication_error", "invalid_api_key", None)
        assert reply.headers["www-authenticate"] == "Bearer"
    assert len(script.requests) == 3


async def test_ids_deadline_and_priority_come_from_headers(gateway: Gateway, script: Script) -> None:
    for _ in range(2):
        reply = await call(gateway, COMPLETIONS, BODY, X_Request_Id="trace", X_Request_Timeout="500.5", X_Priority="-7")
        assert reply.headers["x-request-id"] == "trace"
    first, second = script.requests
    assert first.request_id != second.request_id, "a proxy may give several calls one id"
    assert first.request_id.startswith("trace-")
    assert first.priority == -7
    assert script.time_left is not None
    assert 0 < script.time_left < 502, "gRPC rounds it up"
    await call(gateway, COMPLETIONS, {**BODY, "priority": 3}, X_Priority="9", Idempotency_Key="mine")
    assert (script.requests[2].request_id, script.requests[2].priority) == ("mine", 3)
    too_long = [("X-Request-Timeout", value) for value in ("1e7", "1e8", "9.2e9", "1e300")]
    for header, value in (("X-Request-Timeout", "soon"), ("X-Priority", "high"), ("X-Request-Id", "a b"), *too_long):
        reply = await call(gateway, COMPLETIONS, BODY, **{header: value})
        assert rest(reply) == (400, "invalid_request_error", "invalid_value", header)


async def test_the_longest_time_is_the_deadline_of_every_request(routing: tuple[Script, str], script: Script) -> None:
    async with decant.AsyncClient(routing[1], resume_seconds=0) as client:
        gateway = Gateway(client, Limits(timeout=300))
        for headers in ({}, {"X-Request-Timeout": "900"}):
            await call(gateway, COMPLETIONS, BODY, **headers)
            assert script.time_left is not None
            assert script.time_left < 302, "gRPC rounds it up"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"[]", 400, "invalid_json"),
        (b'{"temperature": NaN}', 400, "invalid_json"),
        (b"\xff", 400, "invalid_json"),
        (b"[" * 4096, 400, "invalid_json"),
        (b" " * 4097, 413, "request_too_large"),
        (b'{"prompt": "\\ud800"}', 400, "invalid_value"),
    ],
)
async def test_a_body_that_cannot_be_read_is_refused(gateway: Gateway, body: bytes, status: int, code: str) -> None:
    reply = await call(gateway, COMPLETIONS, body)
    assert (reply.status, reply.error["code"]) == (status, code)


async def test_more_requests_at_once_than_the_limit_are_refused(gateway: Gateway, script: Script) -> None:
    script.answering = endless_answer
    running = [HttpCall(gateway, COMPLETIONS, {**BODY, "stream": True}) for _ in range(2)]
    tasks = [asyncio.create_task(one()) for one in running]
    for one in running:
        await one.has_sent.wait()
    reply = await call(gateway, COMPLETIONS, BODY)
    assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "overloaded", "1")
    assert (await call(gateway, "/health")).status == 200
    for one in running:
        one.leaves.set()
    await asyncio.gather(*tasks)
    script.answering = None
    assert (await call(gateway, COMPLETIONS, BODY)).status == 200


async def test_unknown_paths_and_methods_are_openais_errors(gateway: Gateway) -> None:
    assert (await call(gateway, "/v1/other", {})).error["code"] == "unknown_url"
    assert (await call(gateway, COMPLETIONS)).status == 405


def test_certificates_come_with_their_keys() -> None:
    for name in ("certificate", "key", "https-certificate", "https-key"):
        with pytest.raises(InvalidSettings, match=f"--{name}: needs"):
            load(GatewaySettings, [f"--{name}", "file.pem"], {})
