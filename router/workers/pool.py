"""The workers that this router knows, and how each stands.

    directory --who is there--> Pool --one for each incarnation--> Worker --> Session
                                                              '--> Seen, for placement

A registration gives a worker's address; from then on its session shows whether it is alive. An expired registration
alone removes nothing: a worker is removed when its session breaks and this router has no runs there. A new incarnation
of an id is a new worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.protos.state_pb2 import WorkerRegistration
from decant.router.admission.wait_prediction import WaitPredictor
from decant.router.placement.cost_model import PrefillTransferCosts
from decant.router.placement.policy import WorkerSnapshot
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.placement.worker_load import WorkerLoad
from decant.router.workers.session import WorkerSession
from decant.router.workers.waiting_line import Kind, WaitingLine, WaitsFor
from decant.runtime import logs
from decant.runtime.channel import Connector
from decant.runtime.peer import enum_name, is_compatible
from decant.runtime.tls import PeerTls
from decant.state.directory import Listing, Workers
from decant.state.errors import StateError
from decant.state.ids import Incarnation

WATCH_SECONDS = 30.0
RETRY_SECONDS = 1.0
BLAMED_SECONDS = 0.5
BLAMED_MOST_SECONDS = 8.0
FINISH_SECONDS = 1.0
"""For the workers to end their sessions when the router leaves."""

_log = logs.get(__name__)


class WorkerHandle:
    """One incarnation of one worker: what it registered, its session, and how it stands."""

    def __init__(
        self, facts: WorkerRegistration, channel: grpc.aio.Channel, session: WorkerSession, generation: int
    ) -> None:
        """`generation` is that of the TLS files which the channel uses."""
        self.facts = facts
        self.generation = generation
        self.load = WorkerLoad(facts)
        self.incarnation = self.load.incarnation
        self.channel = channel
        self.prefill = services.PrefillStub(channel)
        self.session = session
        self.is_registered = True
        self._faults = 0
        self._avoided_until = 0.0

    @property
    def is_usable(self) -> bool:
        """Whether new work may go there."""
        session = self.session
        return session.is_open and not (session.is_suspect or session.is_stuck or self.load.is_draining)

    @property
    def is_wanted(self) -> bool:
        """Whether its session is worth opening."""
        return self.is_registered or self.session.is_busy

    def snapshot(self, prefix: PromptBlocks | None, *, avoided: bool) -> WorkerSnapshot:
        """For a request with that prompt; None: for any."""
        return self.load.snapshot(prefix, avoided=avoided or self.is_avoided)

    @property
    def is_avoided(self) -> bool:
        """Whether it lost a request of late."""
        return asyncio.get_running_loop().time() < self._avoided_until

    def record_failure(self) -> None:
        """It lost a request: others come first for a while, longer each time. A broken worker has the least load."""
        seconds = min(BLAMED_SECONDS * 2**self._faults, BLAMED_MOST_SECONDS)
        self._faults = min(self._faults + 1, 10)
        self._avoided_until = asyncio.get_running_loop().time() + seconds

    def record_success(self) -> None:
        """It brought a request to its end."""
        self._faults = 0


class WorkerPool:
    """All workers. `run` follows the directory; `close`, called after it was cancelled, ends the sessions.

    ``tokenizers`` are the hashes of this router's models, by id.
    ``costs`` are what was measured, by model; ``handoff_min_tokens`` stands for what follows from them, if it is set.
    """

    def __init__(
        self,
        router: wire.Peer,
        directory: Workers,
        tokenizers: Mapping[str, int],
        tls: PeerTls,
        handoff_min_tokens: int | None = None,
    ) -> None:
        now = asyncio.get_running_loop().time
        self.costs = {model: PrefillTransferCosts(now) for model in tokenizers}
        self._handoff_min_tokens = handoff_min_tokens
        self._router = router
        self._directory = directory
        self._tokenizers = tokenizers
        self._connector = Connector(tls)
        self._workers: dict[Incarnation, WorkerHandle] = {}
        self._over: set[Incarnation] = set()  # incarnations that ended, and that the directory may still list
        self._refused: set[Incarnation] = set()  # logged
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._givers: dict[bytes, WorkerSession] = {}
        self.waiting_lines = {model: WaitingLine() for model in tokenizers}
        """Requests that wait for a place, by model."""
        self.wait_predictors = {model: WaitPredictor(now) for model in tokenizers}
        """How long requests wait for a worker to begin with them, by model."""
        self._listed = asyncio.Event()

    async def settled(self) -> None:
        """WaitPredictor until the directory was read and each worker there was opened, or could not be."""
        await self._listed.wait()
        for worker in list(self._workers.values()):
            await worker.session.tried.wait()

    async def close(self) -> None:
        """End all sessions. A worker keeps an ended run for a lease unless it hears that the run is retired."""
        open_sessions = [worker for worker in self._workers.values() if worker.session.is_open]
        finishing = [self._tasks[worker.incarnation] for worker in open_sessions]
        for worker in open_sessions:
            worker.session.finish()
        if finishing:
            await asyncio.wait(finishing, timeout=FINISH_SECONDS)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # What others ask

    @property
    def waiting(self) -> int:
        """Requests that wait for a worker, of all models."""
        return sum(map(len, self.waiting_lines.values()))

    def of(self, model: str) -> Iterator[WorkerHandle]:
        """All that are known for a model, usable or not."""
        return (worker for worker in self._workers.values() if worker.facts.model == model)

    def snapshot(
        self, model: str, avoid: frozenset[Incarnation] | set[Incarnation], prefix: PromptBlocks | None = None
    ) -> list[WorkerSnapshot]:
        """A snapshot of those to which new work may go, for a request with that prompt."""
        return [
            worker.snapshot(prefix, avoided=worker.incarnation in avoid)
            for worker in self.of(model)
            if worker.is_usable
        ]

    def handoff_min_tokens(self, model: str) -> int:
        """Uncached tokens from which a prompt of the model is handed over."""
        if self._handoff_min_tokens is not None:
            return self._handoff_min_tokens
        return self.costs[model].handoff_min_tokens

    def block_sizes(self, model: str) -> set[int]:
        """Tokens of a block, at whoever serves the model."""
        return {worker.load.block_tokens for worker in self.of(model)}

    def worker(self, incarnation: Incarnation) -> WorkerHandle:
        """Raises KeyError for one that has gone."""
        return self._workers[incarnation]

    def record_failure(self, incarnation: Incarnation) -> None:
        """A worker lost a request."""
        if (worker := self._workers.get(incarnation)) is not None:
            worker.record_failure()

    def cancel(self, incarnation: Incarnation, run: wire.Run, reason: wire.Cancel.Reason) -> None:
        """End whatever a worker has of a run, if the worker is still here."""
        if (worker := self._workers.get(incarnation)) is not None:
            worker.session.cancel(wire.Cancel(run=run, reason=reason))

    def is_connected(self, router: Incarnation) -> bool:
        """Whether a worker has a live session with that router, as far as this router's own sessions say. One that was
        opened a moment ago has said nothing yet: until then any router may be connected."""
        return any(worker.session.is_open and worker.load.may_reach(router) for worker in self._workers.values())

    def layout_of(self, model: str) -> int:
        """What all workers of a model have, where it is one layout and gives equal bits; else 0."""
        layouts = {worker.facts.layout if worker.facts.equal_bits else 0 for worker in self.of(model)}
        return layouts.pop() if len(layouts) == 1 else 0

    def max_context_length(self, model: str) -> int | None:
        """Tokens of the shortest window among the usable workers; None while there are none."""
        windows = [worker.facts.capacity.max_context_length for worker in self.of(model) if worker.is_usable]
        return min(windows, default=None)

    def can_receive(self, sender: WorkerHandle, avoid: set[Incarnation]) -> bool:
        """Whether a worker may take a sequence over from this one, which drains: asked again with every heartbeat, for
        every sequence there, so without a look at what each worker has cached."""
        fitting = [
            worker
            for worker in self.of(sender.facts.model)
            if worker is not sender and worker.load.layout == sender.load.layout
            if worker.is_usable and not worker.is_avoided and worker.incarnation not in avoid
        ]
        decodes = [worker for worker in fitting if worker.load.role != wire.ROLE_PREFILL]
        return any(worker.load.has_capacity for worker in decodes or fitting)

    def has_usable(self, model: str) -> bool:
        """Whether any worker of a model may get new work."""
        return any(worker.is_usable for worker in self.of(model))

    def renew_ticket(self, ticket: wire.Ticket, giver: WorkerHandle) -> None:
        """A ticket that nobody has taken yet: this router renews it."""
        self._givers[ticket.id] = giver.session
        giver.session.unclaimed.add(ticket.id)

    def stop_renewing(self, ticket: wire.Ticket) -> None:
        """It has a taker, whose beats renew it from now on."""
        if (giver := self._givers.get(ticket.id)) is not None:
            giver.unclaimed.discard(ticket.id)

    def drop_ticket(self, ticket: wire.Ticket) -> None:
        """It was opened, or nobody will."""
        if (giver := self._givers.pop(ticket.id, None)) is not None:
            giver.unclaimed.discard(ticket.id)
            giver.renewed.discard(ticket.id)

    # What sessions tell

    def opened(self, session: WorkerSession) -> None:
        if (worker := self._workers.get(Incarnation.of(session.worker))) is not None:
            worker.load.forget()
            self._open_all(worker.facts.model)

    def heard(self, session: WorkerSession, beat: wire.Heartbeat) -> None:
        for ticket in beat.renew:
            if (giver := self._givers.get(ticket)) is not None:
                giver.renewed.add(ticket)
        if (worker := self._workers.get(Incarnation.of(session.worker))) is not None:
            worker.load.apply_heartbeat(beat)
            self._open_places(worker)

    # Who waits for a place

    def _open_places(self, worker: WorkerHandle) -> None:
        """One heartbeat says what one worker takes: the line learns for which of its kinds."""
        line = self.waiting_lines[worker.facts.model]
        if line and worker.is_usable and worker.load.has_capacity:
            line.open(kind for kind in line.kinds if self._may_take(worker, kind))

    def _may_take(self, worker: WorkerHandle, kind: Kind) -> bool:
        """As ``placement`` decides, but for what depends on the single request."""
        view, decodes = worker.load, worker.load.role != wire.ROLE_PREFILL
        if kind.place is WaitsFor.CACHE:
            fits = kind.layout == view.layout and kind.sender != worker.incarnation
            return fits and (decodes or not self._any_usable(worker, decodes=True))
        if not view.takes_prompts:
            return False
        if kind.place is WaitsFor.FROM_TOKENS:
            return decodes or not self._any_usable(worker, decodes=True)
        if not decodes or not self._any_usable(worker, decodes=False):
            return True
        return kind.place is WaitsFor.SHORT_PREFILL and view.work.now < self.handoff_min_tokens(worker.facts.model)

    def _any_usable(self, beside: WorkerHandle, *, decodes: bool) -> bool:
        """Whether a worker of that role, with the layout of this one, may get new work."""
        return any(
            (worker.load.role != wire.ROLE_PREFILL) == decodes
            and worker.load.layout == beside.load.layout
            and worker.is_usable
            for worker in self.of(beside.facts.model)
        )

    def _open_all(self, model: str) -> None:
        """Which workers there are has changed."""
        line = self.waiting_lines[model]
        if self.has_usable(model):
            line.open(line.kinds)
        else:
            line.notify_all()

    # What the directory tells

    async def run(self) -> None:
        """Follows the directory for as long as the router incarnations; what is known stays while Redis is away."""
        away = False
        while True:
            try:
                listing = await self._directory.listing()
                away = False
                while True:
                    self._follow(listing)
                    listing = await self._directory.change(listing, WATCH_SECONDS)
            except StateError as error:
                if not away:
                    _log.warning("the directory of workers is away", error=str(error))
                away = True
                await asyncio.sleep(RETRY_SECONDS)

    def _follow(self, listing: Listing[WorkerRegistration]) -> None:
        incarnations = {present.incarnation for present in listing.present}
        self._over &= incarnations
        self._refused &= incarnations
        for incarnation, worker in self._workers.items():
            worker.is_registered = incarnation in incarnations
        for present in listing.present:
            if (
                present.incarnation not in self._workers
                and present.incarnation not in self._over
                and self._fits(present.facts)
            ):
                self._add(present.facts)
        self._listed.set()

    def _fits(self, facts: WorkerRegistration) -> bool:
        """Whether this router can use it; why not is logged once."""
        expected = self._tokenizers.get(facts.model)
        if expected is None:
            return False  # another router's model
        if is_compatible(facts.peer.protocol) and facts.tokenizer == expected:
            return True
        incarnation = Incarnation.of(facts.peer)
        if incarnation not in self._refused:
            self._refused.add(incarnation)
            why = "another tokenizer" if is_compatible(facts.peer.protocol) else "another protocol"
            _log.warning("a worker can't be used", worker=incarnation.id, model=facts.model, why=why)
        return False

    def _add(self, facts: WorkerRegistration) -> None:
        generation = self._connector.generation()
        channel = self._connector.open(facts.address)
        session = WorkerSession(self._router, facts.peer, channel, self)
        worker = WorkerHandle(facts, channel, session, generation)
        self._workers[worker.incarnation] = worker
        self._tasks[worker.incarnation] = asyncio.create_task(self._live(worker))
        _log.info(
            "worker found", worker=worker.incarnation.id, address=facts.address, role=enum_name(wire.Role, facts.role)
        )

    async def _live(self, worker: WorkerHandle) -> None:
        """A worker's time here, from its registration until it is over."""
        try:
            await worker.session.run(lambda: worker.is_wanted and not self._is_outdated(worker))
        finally:
            reopens = worker.is_registered and not worker.session.over and self._is_outdated(worker)
            if worker.is_registered and not reopens:
                self._over.add(worker.incarnation)
            del self._workers[worker.incarnation], self._tasks[worker.incarnation]
            _log.info("worker gone", worker=worker.incarnation.id)
            self._open_all(worker.facts.model)
            await worker.channel.close()
        if reopens and worker.incarnation not in self._workers:
            self._add(worker.facts)

    def _is_outdated(self, worker: WorkerHandle) -> bool:
        """Whether its connection broke and has to be opened anew with other TLS files, and nothing of ours is there."""
        return not worker.session.is_busy and worker.generation != self._connector.generation()
