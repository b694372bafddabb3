"""The RouterAdmin service: what an administrator sees of a router that no tenant may see."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from decant.protos import router_admin_pb2 as wire
from decant.protos import router_admin_pb2_grpc as services
from decant.runtime.serving.server import Service

_SERVICE = wire.DESCRIPTOR.services_by_name["RouterAdmin"]


class RouterAdminService(services.RouterAdminServicer):
    """For administrators alone: serve it only where the settings name them."""

    def __init__(self, list_requests: Callable[[], wire.ListRequestsResponse]) -> None:
        self._list_requests = list_requests

    def service(self) -> Service:
        return Service(
            _SERVICE,
            lambda server: services.add_RouterAdminServicer_to_server(self, server),
            is_administrative=True,
        )

    async def ListRequests(  # noqa: N802 - the names on the wire
        self,
        _: wire.ListRequestsRequest,
        __: grpc.aio.ServicerContext[wire.ListRequestsRequest, wire.ListRequestsResponse],
    ) -> wire.ListRequestsResponse:
        return self._list_requests()
