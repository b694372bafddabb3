from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.placement.policy import WorkerSnapshot
from decant.router.placement.prefix_index import PrefixIndex
from decant.router.placement.worker_load import WorkerLoad
from decant.router.placement.worker_rates import WorkerRates
from decant.router.timings import WorkerTimings
from decant.router.workers.needs import NO_NEEDS, Needs
from decant.router.workers.session import WorkerSession


class WorkerHandle:
    """A worker that the directory lists: its registration, session, load and rates, until it has gone.

    ``WorkerMembership`` makes and closes it; placement takes snapshots of it, and legs use its session and load.
    ``generation`` is that of its channel's TLS files.
    """

    def __init__(
        self,
        registration: WorkerRegistration,
        channel: grpc.aio.Channel,
        session: WorkerSession,
        generation: int,
        timings: WorkerTimings = WorkerTimings(),
        index: PrefixIndex | None = None,
    ) -> None:
        self.registration = registration
        self.model = registration.model
        self.generation = generation
        self.load = WorkerLoad(registration, index)
        self.rates = WorkerRates(registration.capacity)
        self.incarnation = self.load.incarnation
        self.channel = channel
        self.prefill = services.PrefillStub(channel)
        self.session = session
        self.is_registered = True
        self.reported_at = 0.0
        """When its last heartbeat came; 0: none yet."""
        self._timings = timings
        self.adapters: Sequence[wire.Adapter] = registration.adapters
        self._failures = 0  # in a row
        self._avoided_until = 0.0

    @property
    def is_usable(self) -> bool:
        return self.session.is_usable and not self.load.is_draining

    @property
    def is_wanted(self) -> bool:
        return self.is_registered or self.session.is_busy

    def meets(self, needs: Needs) -> bool:
        if self.registration.peer.protocol < needs.protocol:
            return False
        return not needs.adapter or any(adapter.digest == needs.adapter for adapter in self.adapters)

    def remove_adapter(self, digest: str) -> None:
        """Count on an adapter no more that the worker has refused, until the directory lists the worker again."""
        self.adapters = [adapter for adapter in self.adapters if adapter.digest != digest]

    @property
    def is_avoided(self) -> bool:
        return self._avoided_until > 0 and asyncio.get_running_loop().time() < self._avoided_until

    def snapshot(self, cached_tokens: int, *, is_avoided: bool, needs: Needs = NO_NEEDS) -> WorkerSnapshot:
        lacks_adapter = bool(needs.adapter) and not any(
            adapter.in_memory for adapter in self.adapters if adapter.digest == needs.adapter
        )
        return self.load.snapshot_with(cached_tokens, is_avoided or self.is_avoided, lacks_adapter)

    def record_failure(self) -> None:
        self._failures += 1
        self._avoided_until = asyncio.get_running_loop().time() + self._timings.avoidance.seconds(self._failures)

    def record_success(self) -> None:
        self._failures = 0
