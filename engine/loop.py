"""The engine on a thread of its own, fed and heard by an asyncio program.

    event loop                                   engine thread
      call(command) ──> inbox ──┐                  ┌─> run every command in the inbox
                                └── condition ──>──┤
      futures  <──────── call_soon_threadsafe ─────┤   hand over all their answers, if there are any
                                                   │   step
      listener <──────── call_soon_threadsafe ─────┘   hand over the step's output

One hand-over per step for all that comes in, one for all that goes out, one for the answers that somebody waits for:
who asks in the middle of long steps waits for the end of one, not of two. Nothing polls: with no work the thread
sleeps on a condition. A forward pass never runs on the event loop. When the thread ends by a crash, every command
that waits and every later one fails with ``EngineStopped``, the listener hears it once, and ``healthy`` is False.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.output import StepOutput
from decant.engine.pace import StepDurations

T = TypeVar("T")

STOP_SECONDS = 30.0
"""How long a stop waits for the step under way."""

Command = Callable[[Engine], Any]


@dataclass(slots=True)
class _Call:
    """A command on its way through the engine's thread and back."""

    command: Command
    undo: Callable[[Engine, Any], object] | None
    future: asyncio.Future[Any]
    late: bool = False
    """Answered after the step that follows it, not before."""
    value: Any = None
    error: BaseException | None = None

    def run(self, engine: Engine) -> None:
        """On the engine's thread."""
        try:
            self.value = self.command(engine)
        except Exception as error:  # noqa: BLE001 - the caller's error is the caller's answer
            self.error = error

    def answer(self, loop: EngineLoop) -> None:
        """On the event loop."""
        if self.future.cancelled():
            self.undone(loop)
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)

    def undone(self, loop: EngineLoop) -> None:
        """On the event loop, for a caller that has gone."""
        undo = self.undo
        if self.error is None and undo is not None:
            loop.post(lambda engine: undo(engine, self.value))


class EngineLoop:
    """Owns an engine. ``on_step`` and ``on_crash`` are called on the event loop that ``start`` ran on."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepOutput], None],
        on_crash: Callable[[EngineStopped], None] = lambda _: None,
    ) -> None:
        self._engine = engine
        self._on_step = on_step
        self._on_crash = on_crash
        self._inbox: list[_Call] = []
        self._condition = threading.Condition()
        self._stopping = False
        self._stopped: EngineStopped | None = None
        self._step_began: float | None = None
        self._pace = StepDurations()
        self._stalled = False  # the last step found nothing that it could do
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin stepping; call from a running event loop."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and takes commands."""
        return self._thread.is_alive() and self._stopped is None

    @property
    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps. Read from any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def longest_step(self) -> float:
        """Seconds of the longest step so far of the running step's size. Read from any thread."""
        return self._pace.longest(self._engine.planned)

    async def call(self, command: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """Run ``command`` on the engine's thread between two steps; its result or exception is the answer.

        When the caller is cancelled meanwhile, the command may have run already; then ``undo`` gets its result,
        on the engine's thread too. Raises EngineStopped when the thread has ended or ends before the command ran.
        """
        call = _Call(command, undo, self._event_loop.create_future())
        self._enqueue(call)
        try:
            result: T = await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled():  # the answer was there already, and is lost
                call.undone(self)
            raise
        return result

    def post(self, command: Command, then: Callable[[], object] = lambda: None) -> None:
        """Run ``command`` between two steps and wait for nothing; after the end of the thread it is not needed.

        ``then`` is called on the event loop when it ran or can't run any more, after the listener heard of the step
        that came with it.
        """
        future = self._event_loop.create_future()
        future.add_done_callback(lambda done: (done.exception(), then()))
        try:
            self._enqueue(_Call(command, None, future, late=True))
        except EngineStopped as stopped:
            future.set_exception(stopped)

    def _enqueue(self, call: _Call) -> None:
        with self._condition:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.append(call)
            self._condition.notify()

    async def stop(self) -> None:
        """End after the step under way. Raises TimeoutError when that takes longer than ``STOP_SECONDS``."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        async with asyncio.timeout(STOP_SECONDS):
            await asyncio.to_thread(self._thread.join)

    # -- the engine's thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        stopped, batch = EngineStopped("the engine was stopped"), list[_Call]()
        try:
            while self._wait():
                batch = self._take()
                for call in batch:
                    call.run(self._engine)
                if self._engine.has_work:
                    batch = self._answer(batch)
                self._step_began = began = time.monotonic()
                output = self._engine.step()
                self._step_began = None
                if output.num_tokens:
                    self._pace.note(output.num_tokens, time.monotonic() - began)
                self._stalled = not (output.num_tokens or output.ended)
                self._deliver(batch, output)
                batch = []
        except Exception as error:  # noqa: BLE001 - whatever it is, everyone who waits must hear of it
            stopped = EngineStopped(f"the engine crashed: {type(error).__name__}: {error}")
            stopped.__cause__ = error
        finally:
            self._end(batch, stopped)

    def _wait(self) -> bool:
        """Sleep until there is something to do; False: stop."""
        with self._condition:
            self._condition.wait_for(
                lambda: self._inbox or self._stopping or (self._engine.has_work and not self._stalled)
            )
            return not self._stopping

    def _take(self) -> list[_Call]:
        """What came in and is still wanted."""
        with self._condition:
            batch, self._inbox = self._inbox, []
        return [call for call in batch if not call.future.cancelled()]

    def _answer(self, batch: list[_Call]) -> list[_Call]:
        """Answer those that are waited for before a step that may take long; returns the others."""
        waited_for = [call for call in batch if not call.late]
        if waited_for:

            def on_event_loop() -> None:
                for call in waited_for:
                    call.answer(self)

            self._post(on_event_loop)
        return [call for call in batch if call.late]

    def _deliver(self, batch: list[_Call], output: StepOutput) -> None:
        def on_event_loop() -> None:
            for call in batch:
                call.answer(self)
            self._on_step(output)

        self._post(on_event_loop)

    def _end(self, ran: list[_Call], stopped: EngineStopped) -> None:
        """Answer what ran, refuse what waits and what comes, tell the listener of a crash."""
        with self._condition:
            self._stopped = stopped
            left, self._inbox = self._inbox, []
        self._step_began = None
        for call in left:
            call.error = stopped

        def on_event_loop() -> None:
            for call in (*ran, *left):
                call.answer(self)
            if stopped.__cause__ is not None:
                self._on_crash(stopped)

        self._post(on_event_loop)

    def _post(self, callback: Callable[[], None]) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(callback)
