"""Services that are there from the start and answer once the model is loaded.

A server takes its methods before it listens; a worker's services need its engine, which takes long to load. Until
``arrive`` every call is refused by name, so that nobody takes a worker that starts for one that is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from decant.runtime.error_details import Reason
from decant.runtime.errors import Unavailable

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

RETRY_S = 1.0

Add = Callable[[Any], None]
"""Adds a servicer's methods to what it is given: ``add_PrefillServicer_to_server`` and its like."""


class DeferredService(grpc.GenericRpcHandler):
    """The methods of one service, whoever will answer them."""

    def __init__(self, descriptor: ServiceDescriptor) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._refusals = {f"/{descriptor.full_name}/{method.name}": _refusing(method) for method in descriptor.methods}

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self,))

    def attach(self, add: Add) -> None:
        """From now on calls are answered by what ``add`` adds."""
        add(self)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """What gRPC asks for each call."""
        for handler in self._handlers:
            return handler.service(handler_call_details)
        return self._refusals.get(handler_call_details.method)

    # What ``add`` does with a server:

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Handler]) -> None:
        """The same methods once more, for servers that look them up faster."""


async def _refuse(*_: object) -> NoReturn:
    raise Unavailable(Reason.NO_WORKER, "this worker is starting", retry_after=RETRY_S)


def _refusing(method: MethodDescriptor) -> Handler:
    """Answers with a refusal, whatever came."""
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[method.client_streaming, method.server_streaming](_refuse)
