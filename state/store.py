from __future__ import annotations

from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from decant.protos.state_pb2 import RouterRegistration, WorkerRegistration
from decant.state.client import Client
from decant.state.connections import ConnectionAges
from decant.state.directory import Directory, Routers, Workers
from decant.state.keys import Ttls
from decant.state.open_requests import OpenRequests
from decant.state.pool_moves import PoolMoves
from decant.state.quota import Quotas
from decant.state.requests import Requests
from decant.state.store_instance import StoreInstance
from decant.state.urls import check_url


@dataclass(frozen=True)
class StoreSettings:
    url: str = field(repr=False)  # see urls.py; may hold a password
    deadline_s: float = 1.0  # of one call
    max_connections: int = 16  # of each kind: writes of requests, reads of requests, the directory
    ttls: Ttls = field(default_factory=Ttls)

    def __post_init__(self) -> None:
        check_url(self.url)
        if self.deadline_s <= 0:
            raise ValueError(f"deadline_s: above 0, got {self.deadline_s}")
        if self.max_connections < 2:
            raise ValueError(f"max_connections: from 2 (a watch holds one), got {self.max_connections}")


class Store:
    """Access to Redis, for the event loop that uses it first.

    Registrations with quotas, writes, and reads have separate connections: reads delay no registration.
    """

    def __init__(self, settings: StoreSettings) -> None:
        ages = ConnectionAges()
        self._client, self._reads, self._directory = self._clients = [
            Client(settings.url, settings.deadline_s, settings.max_connections, ages) for _ in range(3)
        ]
        ttls = settings.ttls
        self.workers: Workers = Directory(self._directory, "workers", WorkerRegistration, ttls)
        self.routers: Routers = Directory(self._directory, "routers", RouterRegistration, ttls)
        self.instance = StoreInstance(self._directory, ttls)
        self.quotas = Quotas(self._directory, ttls)
        self.pool_moves = PoolMoves(self._directory)
        self.open = OpenRequests(self._client, ttls)
        self.requests = Requests(self._client, self._reads, self.routers, self.open, self.instance, ttls)
        self.results = self.requests.results

    async def ping(self) -> None:
        """Wait for an answer of Redis. Raises StoreFault for a wrong password."""
        await self._client.execute("PING")

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
