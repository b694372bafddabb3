"""Workers in the directory, and a session with each, which shows whether it is alive.

A worker that is not registered is removed when its session breaks and this router has no runs there. A new incarnation
of an id is a new worker. While Redis is unavailable, the known workers stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import UnusedWorker, WorkerRegistration
from decant.router.placement.prefix_index import PrefixIndex
from decant.router.timings import WorkerTimings
from decant.router.workers.session import WorkerSession
from decant.router.workers.subscription import SessionObserver
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.background import RestartPolicy, run_restarting, start_task
from decant.runtime.connections.channel import Connector
from decant.runtime.connections.tls import PeerTls
from decant.runtime.enum_names import enum_name
from decant.runtime.error_details import Reason
from decant.runtime.errors import RETRY_AFTER_SECONDS, Unavailable
from decant.runtime.protocol import PROTOCOL, is_compatible
from decant.runtime.telemetry import logs
from decant.state.directory import Listing, Workers
from decant.state.errors import StateError
from decant.state.ids import Incarnation

_log = logs.get(__name__)


def _unusable(message: str, reason: Reason = Reason.NO_WORKER) -> Unavailable:
    return Unavailable(reason, message, retry_after=RETRY_AFTER_SECONDS)


class MembershipObserver(SessionObserver, Protocol):
    def on_members_changed(self, model: str) -> None: ...


class WorkerMembership:
    """Known workers; `close` comes after `run`. ``tokenizers``, by model id, are the hashes that a worker may have."""

    def __init__(
        self,
        router: wire.Peer,
        directory: Workers,
        tokenizers: Mapping[str, Collection[int]],
        tls: PeerTls,
        observer: MembershipObserver,
        timings: WorkerTimings,
    ) -> None:
        self._router = router
        self._directory = directory
        self._tokenizers = tokenizers
        self.prefix_indexes = {model: PrefixIndex() for model in tokenizers}
        self._connector = Connector(tls)
        self._observer = observer
        self._timings = timings
        self._registered: dict[Incarnation, WorkerRegistration] = {}  # by the last listing
        self._workers: dict[Incarnation, WorkerHandle] = {}
        self._ended: set[Incarnation] = set()  # ended, and the directory may still list them
        self._rejected: dict[Incarnation, Unavailable] = {}  # logged; of those that ended too
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._is_listed = asyncio.Event()

    def __iter__(self) -> Iterator[WorkerHandle]:
        return iter(self._workers.values())

    def get(self, incarnation: Incarnation) -> WorkerHandle | None:
        return self._workers.get(incarnation)

    def unused(self) -> list[UnusedWorker]:
        """Registered workers that this router can't use, and why."""
        reasons = {one: str(why) for one, why in self._rejected.items()}
        reasons |= {
            one: f"no session: {worker.session.break_reason}"
            for one, worker in self._workers.items()
            if worker.is_registered and not worker.session.is_open and worker.session.break_reason
        }
        return [
            UnusedWorker(id=one.id, incarnation=one.incarnation, reason=why) for one, why in sorted(reasons.items())
        ]

    async def wait_settled(self) -> None:
        await self._is_listed.wait()
        for worker in list(self):
            await worker.session.attempted.wait()

    async def close(self) -> None:
        """End all sessions, and have workers forget ended runs, which they would keep for a lease."""
        self._registered = {}  # none is added any more
        open_workers = [worker for worker in self if worker.session.is_open]
        finishing = [self._tasks[worker.incarnation] for worker in open_workers]
        for worker in open_workers:
            worker.session.finish()
        if finishing:
            await asyncio.wait(finishing, timeout=self._timings.close_s)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def run(self) -> None:
        is_unavailable = False
        while True:
            try:
                listing = await self._directory.listing()
                is_unavailable = False
                while True:
                    self._apply(listing)
                    listing = await self._directory.wait_for_change(listing, self._timings.watch_s)
            except StateError as error:
                if not is_unavailable:
                    _log.warning("the directory of workers is unavailable", error=str(error))
                is_unavailable = True
                await asyncio.sleep(self._timings.retry_s)

    def _apply(self, listing: Listing[WorkerRegistration]) -> None:
        self._registered = {entry.incarnation: entry.registration for entry in listing.present}
        self._ended &= self._registered.keys()
        self._rejected = {one: error for one, error in self._rejected.items() if one in self._registered}
        for incarnation, worker in self._workers.items():
            worker.is_registered = incarnation in self._registered
            if worker.is_registered:
                worker.adapters = self._registered[incarnation].adapters
        self._add_registered()
        self._is_listed.set()

    def _add_registered(self) -> None:
        for incarnation, registration in self._registered.items():
            if (
                incarnation not in self._workers
                and incarnation not in self._ended
                and self._is_compatible(registration)
            ):
                self._add(registration)

    def _is_compatible(self, registration: WorkerRegistration) -> bool:
        if registration.model not in self._tokenizers:
            return False  # another router's model
        incarnation = Incarnation.of(registration.peer)
        error = self._incompatibility(registration)
        if error is None:
            self._rejected.pop(incarnation, None)
            return True
        if incarnation not in self._rejected:
            self._rejected[incarnation] = error
            _log.warning("a worker can't be used", worker=incarnation.id, model=registration.model, reason=str(error))
        return False

    def _incompatibility(self, registration: WorkerRegistration) -> Unavailable | None:
        model, worker, protocol = registration.model, registration.peer.id, registration.peer.protocol
        if not is_compatible(protocol):
            return _unusable(f"worker {worker} of {model} has protocol {protocol}, and this router {PROTOCOL}")
        hashes, hash = self._tokenizers[model], registration.token_ids or registration.tokenizer
        if hash not in hashes:
            own = " or ".join(sorted(f"{hash:016x}" for hash in hashes))
            message = f"worker {worker} has tokenizer {hash:016x} of {model}, and this router {own}"
            return _unusable(message, Reason.TOKENIZER_MISMATCH)
        if any(
            not is_compatible(protocol, one.registration.peer.protocol)
            for one in self
            if one.registration.model == model
        ):  # to which it could not hand over
            return _unusable(f"worker {worker} has a protocol two versions from that of another worker of {model}")
        return None

    def why_unserved(self, model: str) -> Unavailable:
        """Error for a request of a model that no worker serves: why a registered one is not used, if there is one."""
        for incarnation, error in self._rejected.items():
            if (registration := self._registered.get(incarnation)) is not None and registration.model == model:
                return error
        return _unusable(f"no worker serves {model} now")

    def _add(self, registration: WorkerRegistration) -> None:
        generation = self._connector.generation()
        channel = self._connector.open(registration.address)
        session = WorkerSession(self._router, registration.peer, channel, self._observer, self._timings)
        index = self.prefix_indexes[registration.model]
        worker = WorkerHandle(registration, channel, session, generation, self._timings, index)
        self._workers[worker.incarnation] = worker
        self._tasks[worker.incarnation] = start_task("worker", self._serve(worker), worker=worker.incarnation.id)
        role = enum_name(wire.Role, registration.role)
        _log.info("worker added", worker=worker.incarnation.id, address=registration.address, role=role)

    async def _serve(self, worker: WorkerHandle) -> None:
        session, name = worker.session, f"session with {worker.incarnation.id}"
        try:
            await run_restarting(
                name,
                lambda: session.run(lambda: worker.is_wanted and not self._is_outdated(worker)),
                RestartPolicy(pause=self._timings.session_backoff),
            )
        finally:
            reopens = worker.is_registered and not session.is_final and self._is_outdated(worker)
            if worker.is_registered and not reopens:
                self._ended.add(worker.incarnation)
                reason = session.break_reason or "its session failed"
                message = f"worker {worker.incarnation.id} of {worker.model} is not used: {reason}"
                self._rejected[worker.incarnation] = _unusable(message)
            del self._workers[worker.incarnation], self._tasks[worker.incarnation]
            worker.load.close()
            _log.info("worker removed", worker=worker.incarnation.id)
            self._observer.on_members_changed(worker.registration.model)
            await worker.channel.close()
        self._add_registered()  # this one if it reopens, and those that could not be used beside it

    def _is_outdated(self, worker: WorkerHandle) -> bool:
        return not worker.session.is_busy and worker.generation != self._connector.generation()
