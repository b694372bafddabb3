"""The one stream between this router and one worker, for as long as both live.

    opening --welcome--> open --breaks--> opening ... after 100 ms, 200 ms, ... 1 s
       |                   |                 |
       |                   |                 |-- the connection is refused: the runs there lost their worker now
       |                   |                 '-- still not open after RECONNECT_SECONDS: so they did then
       |                   '-- silent: suspect after 1 s, broken after 3 s
       '-- it is another life, or nobody wants it any more: over

    worker's frame  slots | 3 | 7 | 3 |      slot -> Following -> Pen -> Course
                positions |40 |12 |41 |
                   tokens | a | b | c |

What the router sends leaves in one queue, see ``outgoing``. Heartbeats have a task of their own, and carry with them
the renewals of tickets and the runs that ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.router.execution.token_writer import WriteError, unpack
from decant.router.workers.outgoing import Outgoing
from decant.router.workers.stream_io import StreamBroken, read, write
from decant.router.workers.subscription import (
    RunKey,
    RunSubscription,
    SessionDependent,
    SessionObserver,
    key_of,
)
from decant.runtime import logs
from decant.runtime.error_details import Reason
from decant.runtime.heartbeat import HEARTBEAT_SECONDS, LoopTimer, Silence, loop_timeout
from decant.runtime.peer import UnknownMessages, same_life
from decant.runtime.shutdown import first

RECONNECT_SECONDS = 1.0
"""After a break, before the runs there are given up."""
WELCOME_SECONDS = 5.0
FIRST_BACKOFF_SECONDS = 0.1
LAST_BACKOFF_SECONDS = 1.0
STUCK_MS = 2_000
GIVEN_UP_MS = 10_000
STUCK_STEPS = 8
"""A step is stuck when it is older than STUCK_MS and than so many of the longest steps of its size; runs move elsewhere
when it is also older than GIVEN_UP_MS."""

_log = logs.get(__name__)


class WorkerSession:
    """All that this router says to and hears from one life of one worker. Lives on one event loop."""

    def __init__(
        self, router: wire.Peer, worker: wire.Peer, channel: grpc.aio.Channel, watcher: SessionObserver
    ) -> None:
        self.worker = worker
        self.over = False
        """The worker is another life by now, or speaks another protocol: never open again."""
        self.tried = asyncio.Event()
        """Set once it was opened, or could not be."""
        self.guests: set[SessionDependent] = set()
        self.unclaimed: set[bytes] = set()
        """Tickets of this worker's that nobody has taken yet."""
        self.renewed: set[bytes] = set()
        """Tickets of this worker's whose takers renewed them since the last beat."""
        self.unknown = UnknownMessages(worker.id)
        self.conflicts = 0
        """Tokens that came for a known position and differed."""
        self._router = router
        self._stub = services.DecodeStub(channel)
        self._watcher = watcher
        self._beat = wire.Heartbeat()
        self._silence = Silence()
        self._runs: dict[RunKey, RunSubscription] = {}
        self._slots: dict[int, RunSubscription] = {}
        self._incomplete: set[RunSubscription] = set()  # ended, and some tokens are still to come
        self._outgoing = Outgoing()
        self._grace: LoopTimer | None = None

    @property
    def is_open(self) -> bool:
        return self._outgoing.is_open

    @property
    def is_busy(self) -> bool:
        """Whether anything of ours is there."""
        return bool(self._runs or self.guests)

    @property
    def is_suspect(self) -> bool:
        return self._silence.is_suspect

    @property
    def is_stuck(self) -> bool:
        return self._step_older_than(STUCK_MS)

    # What the router says

    def start(self, following: RunSubscription) -> None:
        """Begin a run, or take it over; while the session is down that is done with the next one."""
        self._runs[following.key] = following
        if self.is_open:
            self._say(following.opening_message())
        else:
            self._hope()

    def leave(self, following: RunSubscription, cancel: wire.Cancel) -> None:
        """End a run that is not wanted any more, whatever it is doing. It is told nothing from now on."""
        if self._runs.get(following.key) is following:
            self._forget(following)
            self.cancel(cancel)

    def forget(self, following: RunSubscription) -> None:
        """Another worker has a run, with all its tokens: nothing more is heard of it here."""
        if self._runs.get(following.key) is following:
            self._forget(following)
            self._outgoing.forget(following.run)

    def migrate(self, migrate: wire.Migrate) -> None:
        """Ask for a ticket for a run, or withdraw that."""
        if self.is_open:
            self._say(wire.RouterMessage(migrate=migrate))

    def cancel(self, cancel: wire.Cancel) -> None:
        """End whatever is there of a run."""
        self._outgoing.cancel(cancel)

    def _say(self, message: wire.RouterMessage) -> None:
        self._outgoing.send(message)

    def _forget(self, following: RunSubscription) -> None:
        del self._runs[following.key]
        self._incomplete.discard(following)
        for slot in following.slots:
            if self._slots.get(slot) is following:
                del self._slots[slot]

    # Its life

    async def run(self, is_wanted: Callable[[], bool]) -> None:
        """Opens it, again when it breaks, until it is over or nobody wants it. Cancel to end it."""
        backoff = FIRST_BACKOFF_SECONDS
        try:
            while not self.over and is_wanted():
                if await self._once():
                    backoff = FIRST_BACKOFF_SECONDS
                if not self.over:
                    await asyncio.sleep(backoff)
                    backoff = min(2 * backoff, LAST_BACKOFF_SECONDS)
        finally:
            self.tried.set()
            self._give_up()

    async def _once(self) -> bool:
        """One session from hello to break; whether it was ever open."""
        call = self._stub.Session()
        is_lost = False
        try:
            await self._open(call)
            await first(self._hear(call), self._outgoing.write(call), self._keep_beating())
        except (StreamBroken, TimeoutError) as error:
            self._note(error)
            is_lost = isinstance(error, StreamBroken) and error.is_of_dead_process
        except ValueError as error:  # arrays that are none: it would send them again
            self._note(error)
            is_lost = True
        finally:
            was_open = self.is_open
            self._outgoing.close()
            call.cancel()
            self.tried.set()
            self._broke()
        if is_lost:
            self._give_up()
        return was_open

    async def _open(self, call: Any) -> None:
        self._outgoing.begin()
        named = set(self._runs)
        owned = [following.owned() for following in self._runs.values()]
        hello = wire.Hello(router=self._router, worker=self.worker, owned=owned)
        async with loop_timeout(WELCOME_SECONDS):
            await write(call, wire.RouterMessage(hello=hello))
            answer = await read(call)
        if answer is None or not answer.HasField("welcome"):
            raise StreamBroken("no welcome")
        if not same_life(answer.welcome.worker, self.worker):
            raise StreamBroken("the welcome is of another life", Reason.WRONG_PEER)
        self._welcomed(answer.welcome)
        for following in [each for key, each in self._runs.items() if key not in named]:
            self._say(following.opening_message())  # begun while the worker was greeted

    def _welcomed(self, welcome: wire.Welcome) -> None:
        self._outgoing.open(list(welcome.orphans))
        self._silence.reset()
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        self.tried.set()
        for held in welcome.runs:
            self._held(held)
        for run in welcome.unknown_runs:
            self._lacks(run)
        _log.info("session open", worker=self.worker.id, held=len(welcome.runs), orphans=len(welcome.orphans))
        self._watcher.opened(self)

    def _lacks(self, run: wire.Run) -> None:
        """Said before the break, and perhaps never heard: it is said again. What was heard once is gone."""
        following = self._runs.get(key_of(run))
        if following is not None and following.start is not None:
            self._say(wire.RouterMessage(start=following.start))
        elif following is not None:
            self._fail(following, wire.CAUSE_UNKNOWN_RUN, "the worker lacks it after a break")

    def _broke(self) -> None:
        self._beat = wire.Heartbeat()
        self._slots.clear()
        for following in self._runs.values():
            following.slots.clear()
            following.last_resend_position = None
        if self.is_busy:
            self._hope()

    def _hope(self) -> None:
        """Those who are here wait a little for the session to come back."""
        if self._grace is None:
            self._grace = LoopTimer(RECONNECT_SECONDS, self._give_up)

    def _give_up(self, detail: str = "the session broke and did not come back") -> None:
        """All requests here go to other workers. What the worker still runs of them is cancelled there."""
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        for following in list(self._runs.values()):
            self.cancel(wire.Cancel(run=following.run, reason=wire.Cancel.REASON_ATTEMPT))
            self._fail(following, wire.CAUSE_PEER_LOST, detail)
        for guest in list(self.guests):
            guest.on_session_lost()

    def _note(self, error: Exception) -> None:
        if isinstance(error, StreamBroken) and error.reason in (Reason.WRONG_PEER, Reason.WRONG_PROTOCOL):
            self.over = True
        if self.is_open or self.over:
            _log.warning("session broke", worker=self.worker.id, error=str(error), over=self.over)

    # The tasks of an open session; the third writes the queue

    async def _keep_beating(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            self._silence.tick()
            if self._silence.is_lost:
                raise StreamBroken("no message was received for too long")
            self._outgoing.heartbeat(wire.Heartbeat(renew=self.unclaimed | self.renewed))
            self.renewed.clear()

    async def _hear(self, call: Any) -> None:
        while (message := await read(call)) is not None:
            self._silence.reset()
            self._take(message)

    def _take(self, message: wire.WorkerMessage) -> None:
        kind = message.WhichOneof("message")
        match kind:
            case "frame":
                self._write(message.frame)
            case "heartbeat":
                self._hear_beat(message.heartbeat)
            case "run_status":
                self._held(message.run_status)
            case "decode_started":
                self._join(message.decode_started)
            case "ended":
                self._ended(message.ended)
            case "scheduled":
                if (following := self._reported(message.scheduled.run)) is not None:
                    following.listener.on_scheduled(message.scheduled)
            case "ticket":
                if (following := self._reported(message.ticket.run)) is not None:
                    following.listener.on_offer(message.ticket)
            case "prompt_logprobs":
                self._explain(message.prompt_logprobs)
            case "refused":
                if (following := self._removed(message.refused.run)) is not None:
                    following.listener.on_refused(message.refused)
            case "failed":
                if (following := self._removed(message.failed.run)) is not None:
                    following.listener.on_failed(message.failed)
            case "superseded":
                if (following := self._removed(message.superseded.run)) is not None:
                    following.listener.on_superseded(message.superseded)
            case None:
                self.unknown.ignore()

    # What the worker says

    def _write(self, frame: wire.Frame) -> None:
        slots = self._slots
        logprobs = {entry.entry: entry for entry in frame.logprobs}
        entries = zip(unpack(frame.slots), unpack(frame.positions), unpack(frame.tokens), strict=True)
        for entry, (slot, position, token) in enumerate(entries):
            following = slots.get(slot)
            if following is not None:
                trouble = following.sink.put(position, token, logprobs.get(entry) if logprobs else None)
                if trouble is not None:
                    self._troubled(following, trouble)
        if self._incomplete:
            for following in [each for each in self._incomplete if each.is_complete]:
                self._finish(following)

    def _explain(self, told: wire.PromptLogprobs) -> None:
        following = self._runs.get(key_of(told.run))
        if following is not None and (trouble := following.sink.explain(told)) is not None:
            self._troubled(following, trouble)

    def _troubled(self, following: RunSubscription, trouble: WriteError) -> None:
        if trouble is WriteError.GAP:
            self._ask_again(following)
            return
        if trouble is WriteError.CONFLICT:
            self.conflicts += 1
            self._refuse(following, "it brought another token for a known position")
        else:
            self._refuse(following, "it brought a token or logprobs that the request can't have")

    def _refuse(self, following: RunSubscription, detail: str) -> None:
        """A message about this run is wrong: the attempt fails here, and the worker's other runs go on."""
        _log.error("a worker's message about a run is wrong", worker=self.worker.id, run=following.key, why=detail)
        self.cancel(wire.Cancel(run=following.run, reason=wire.Cancel.REASON_ATTEMPT))
        self._fail(following, wire.CAUSE_CORRUPT, detail)

    def _ask_again(self, following: RunSubscription) -> None:
        """Once for each place: the stream loses nothing."""
        if following.last_resend_position != following.position:
            following.last_resend_position = following.position
            resend = wire.Resend(run=following.run, resume=following.resume_position)
            self._say(wire.RouterMessage(resend=resend))

    def _hear_beat(self, beat: wire.Heartbeat) -> None:
        self._beat = beat
        if self._step_older_than(GIVEN_UP_MS) and self.is_busy:
            _log.warning("a step is stuck, its runs go elsewhere", worker=self.worker.id, age_ms=beat.step_age_ms)
            self._give_up(f"its step is stuck: {beat.step_age_ms} ms old")
        self._watcher.heard(self, beat)
        if beat.load.draining:
            for following in list(self._runs.values()):
                following.listener.on_draining()

    def _step_older_than(self, ms: int) -> bool:
        beat = self._beat
        return beat.HasField("step_age_ms") and beat.step_age_ms > max(ms, STUCK_STEPS * beat.longest_step_ms)

    def _join(self, decode_started: wire.DecodeStarted) -> None:
        following = self._reported(decode_started.run)
        if following is not None:
            self._number(following, decode_started.slots)
            following.listener.on_decode_started(decode_started)

    def _held(self, held: wire.RunStatus) -> None:
        following = self._reported(held.run)
        if following is not None:
            self._number(following, held.slots)
            following.listener.on_run_status(held)
            for end in held.ended:
                self._ended(wire.Ended(run=held.run, end=end))

    def _number(self, following: RunSubscription, slots: Iterable[wire.Slot]) -> None:
        for slot in slots:
            self._slots[slot.slot] = following
            following.slots.add(slot.slot)

    def _ended(self, ended: wire.Ended) -> None:
        following = self._runs.get(key_of(ended.run))
        if following is None:
            self._outgoing.forget(ended.run)
            return
        if ended.end.end_position > following.end_limit:
            self._refuse(following, f"it ended at {ended.end.end_position}, after {following.end_limit}")
            return
        following.ended = ended
        if following.is_complete:
            self._finish(following)
        else:
            self._incomplete.add(following)
            self._ask_again(following)

    def _finish(self, following: RunSubscription) -> None:
        assert following.ended is not None
        self._forget(following)
        self._outgoing.forget(following.run)
        following.listener.on_ended(following.ended)

    def _fail(self, following: RunSubscription, cause: wire.Cause, detail: str) -> None:
        self._forget(following)
        failure = wire.Failure(cause=cause, detail=detail)
        following.listener.on_failed(wire.Failed(run=following.run, failure=failure))

    def _reported(self, run: wire.Run) -> RunSubscription | None:
        """The run, of which the worker has reported something."""
        following = self._runs.get(key_of(run))
        if following is not None:
            following.start = None
        return following

    def _removed(self, run: wire.Run) -> RunSubscription | None:
        following = self._runs.get(key_of(run))
        if following is not None:
            self._forget(following)
        return following
