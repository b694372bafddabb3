"""The ASGI application: routes, limits, and errors as OpenAI's objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from decant.client import AsyncClient
from decant.gateway import calls, chat, completions, embeddings, model_list
from decant.gateway.errors import ApiError, ErrorObject, error_object
from decant.gateway.generation import Caller
from decant.gateway.responses import ClientLeft, EventStream, JsonResponse, unless_left
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_ELSEWHERE_SECONDS, Cancelled, ServiceError, Unavailable

HEALTH_S = 2.0
"""Time for a router to answer a health check."""
_LEFT = 499
"""Status of a request whose client has left, which no client reads."""
_AT_ONCE = frozenset({Reason.QUOTA_EXCEEDED, Reason.QUEUE_FULL, Reason.NO_WORKER})


@dataclass(frozen=True)
class Limits:
    timeout: float | None = None
    max_requests: int = 1024
    max_body_bytes: int = 4 * 1024 * 1024


def refuse_at_once(error: ServiceError) -> None:
    """Have the client raise a refusal that it would repeat after a while: HTTP's clients do so themselves."""
    if error.reason in _AT_ONCE:
        raise error


class Gateway:
    """ASGI application over a client, whose calls get the credentials of each HTTP call."""

    def __init__(self, client: AsyncClient, limits: Limits) -> None:
        client._routers.on_wait = refuse_at_once
        self.is_draining = False
        self._client = client
        self._limits = limits
        self._num_open = 0
        self._created = int(time.time())
        self._routes: ASGIApp = Starlette(
            routes=[
                Route("/v1/chat/completions", partial(self._generate, chat, "chatcmpl"), methods=["POST"]),
                Route("/v1/completions", partial(self._generate, completions, "cmpl"), methods=["POST"]),
                Route("/v1/embeddings", self._embed, methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route("/health", self._health),
            ],
            exception_handlers={
                ApiError: _respond_api_error,
                ServiceError: self._respond_service_error,
                HTTPException: _respond_http_error,
                ClientLeft: _respond_nothing,
                Exception: _respond_fault,
            },
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError(f"{scope['type']}: only http is served")
        if self._num_open >= self._limits.max_requests and scope["path"] != "/health":
            text = f"at most {self._limits.max_requests} requests at once (--max-requests)"
            error = ErrorObject(503, text, "server_error", "overloaded", retry_after=1)
            await _response(error)(scope, receive, send)
            return
        self._num_open += 1
        try:
            await self._routes(scope, receive, send)
        finally:
            self._num_open -= 1

    @property
    def num_open(self) -> int:
        """Requests whose answers are not yet sent."""
        return self._num_open

    async def end_calls(self) -> None:
        """End what still runs: with an error that says that this gateway stops."""
        self.is_draining = True
        await self._client.close()

    async def _generate(self, endpoint: ModuleType, prefix: str, request: Request) -> Any:
        caller, shown, body = await self._begin(request, endpoint)
        wanted = endpoint.request(body)
        frame = calls.frame(prefix, caller.id, int(time.time()), body)
        headers = {calls.REQUEST_ID: shown}
        if wanted.is_stream:
            chunks = endpoint.chunks(caller, wanted, frame)
            return EventStream(chunks, headers, partial(self._error_object, endpoint.NAMES))
        work = endpoint.whole(caller, wanted, frame)
        return JsonResponse(await unless_left(request.receive, work), headers=headers)

    async def _embed(self, request: Request) -> Response:
        caller, shown, body = await self._begin(request, embeddings)
        made = await unless_left(request.receive, embeddings.whole(caller, body))
        return JsonResponse(made, headers={calls.REQUEST_ID: shown})

    async def _begin(self, request: Request, endpoint: ModuleType) -> tuple[Caller, str, dict[str, Any]]:
        id, shown = calls.ids_of(request)
        request.state.names = endpoint.NAMES
        request.state.shown_id = shown
        client = calls.client_of(request, self._client)
        deadline = Deadline.after(calls.timeout_of(request, self._limits.timeout))
        caller = Caller(client, id, deadline, has_key=calls.IDEMPOTENCY_KEY in request.headers)
        return caller, shown, await calls.body_of(request, self._limits.max_body_bytes)

    async def _list_models(self, request: Request) -> Response:
        return JsonResponse(await model_list.listed(calls.client_of(request, self._client), self._created))

    async def _show_model(self, request: Request) -> Response:
        client = calls.client_of(request, self._client)
        return JsonResponse(await model_list.one(client, request.path_params["name"], self._created))

    async def _health(self, request: Request) -> Response:
        """Whether this gateway takes requests, and a router answers it, if only that it needs credentials."""
        if self.is_draining:
            return JsonResponse({"status": "draining"}, status_code=503)
        try:
            async with asyncio.timeout(HEALTH_S):
                await self._client.server_info()
        except (ServiceError, TimeoutError) as error:
            if not isinstance(error, ServiceError) or error.reason is not Reason.NO_CREDENTIALS:
                return JsonResponse({"status": "no router answers"}, status_code=503)
        return JsonResponse({"status": "ok"})

    def _error_object(self, names: Mapping[str, str], error: ServiceError) -> ErrorObject:
        if self.is_draining and isinstance(error, Cancelled):
            error = Unavailable(Reason.DRAINING, "this gateway stops", retry_after=RETRY_ELSEWHERE_SECONDS)
        return error_object(error, names)

    async def _respond_service_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return _response(self._error_object(getattr(request.state, "names", {}), error), request)


_Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _respond_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _response(error.error, request)


async def _respond_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    text = f"{method} {path}: no such endpoint" if error.status_code == 404 else f"{method} {path}: {error.detail}"
    return _response(ErrorObject(error.status_code, text, "invalid_request_error", "unknown_url"), request)


async def _respond_nothing(request: Request, error: Exception) -> Response:
    return Response(status_code=_LEFT)


async def _respond_fault(request: Request, error: Exception) -> Response:
    # Starlette raises the error again, and uvicorn logs it.
    return _response(ErrorObject(500, "internal error", "server_error", "internal"), request)


def _response(error: ErrorObject, request: Request | None = None) -> Response:
    headers = dict(error.headers)
    if request is not None and (shown := getattr(request.state, "shown_id", None)):
        headers[calls.REQUEST_ID] = shown
    return JsonResponse(error.body, status_code=error.status, headers=headers)
