"""gRPC services that are registered before the server listens, and attached once the model is loaded.

A gRPC server takes no services after its start. Until ``attach`` every call is refused with UNAVAILABLE. A gate of
`ErrorInterceptor` would need the handlers at the server's start, and they are made from the loaded engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, Unavailable

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

Add = Callable[[Any], None]


class DeferredService(grpc.GenericRpcHandler):
    def __init__(self, descriptor: ServiceDescriptor) -> None:
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._refusals = {f"/{descriptor.full_name}/{method.name}": _refusing(method) for method in descriptor.methods}

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self,))

    def attach(self, add: Add) -> None:
        add(self)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        for handler in self._handlers:
            return handler.service(handler_call_details)
        return self._refusals.get(handler_call_details.method)

    # The methods of a server that ``add`` calls:

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, name: str, handlers: Mapping[str, Handler]) -> None:
        """Do nothing: this registration only allows a faster look-up."""


async def _refuse(*_: object) -> NoReturn:
    raise Unavailable(Reason.NO_WORKER, "this worker is starting", retry_after=RETRY_AFTER_SECONDS)


def _refusing(method: MethodDescriptor) -> Handler:
    kinds = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return kinds[method.client_streaming, method.server_streaming](_refuse)
