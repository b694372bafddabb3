"""The engine on a thread of its own, driven by asyncio code.

    event loop                                   engine thread
      call(command) ──> inbox ──┐                  ┌─> run all commands of the inbox
                                └── condition ──>──┤
      futures  <──────── call_soon_threadsafe ─────┤   answer those that callers await
                                                   │   step
      listener <──────── call_soon_threadsafe ─────┘   deliver the step's output

A call waits for at most one step.
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

T = TypeVar("T")

STOP_SECONDS = 30.0

Command = Callable[[Engine], Any]


class StepDurations:
    """Longest step so far of each size class: 1 token, 2 to 3, 4 to 7, ...

    Written by the engine's thread, read from any.
    """

    def __init__(self) -> None:
        self._longest: dict[int, float] = {}

    def note(self, tokens: int, seconds: float) -> None:
        size = tokens.bit_length()
        if seconds > self._longest.get(size, 0.0):
            self._longest[size] = seconds

    def longest(self, tokens: int) -> float:
        size, known = tokens.bit_length(), dict(self._longest)
        larger = min((other for other in known if other >= size), default=max(known, default=0))
        return known.get(larger, 0.0)


@dataclass(slots=True)
class _Call:
    """Command; ``run`` is called on the engine's thread, the other methods on the event loop."""

    command: Command
    undo: Callable[[Engine, Any], object] | None
    future: asyncio.Future[Any]
    is_posted: bool = False  # answered after the step; its exception is a crash, as it has no caller
    value: Any = None
    error: BaseException | None = None

    def run(self, engine: Engine) -> None:
        try:
            self.value = self.command(engine)
        except Exception as error:  # noqa: BLE001 - answered to the caller
            self.error = error

    def raise_without_caller(self) -> None:
        if self.is_posted and self.error is not None:
            raise self.error

    def answer(self, loop: EngineLoop) -> None:
        if self.future.cancelled():
            self.undo_if_cancelled(loop)
        elif self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.value)

    def undo_if_cancelled(self, loop: EngineLoop) -> None:
        undo = self.undo
        if self.error is None and undo is not None:
            loop.post(lambda engine: undo(engine, self.value))


class EngineLoop:
    """Thread of an engine; its properties may be read from any thread.

    ``on_step`` and ``on_crash`` are called on the event loop that ``start`` ran on.
    """

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
        self._durations = StepDurations()
        self.busy_steps = 0
        """Steps that computed tokens, ever."""
        self.busy_seconds = 0.0
        """Seconds of these steps, with what the thread does between them."""
        self.busy_tokens = 0
        """Tokens that these steps computed."""
        self._stalled = False  # the last step had nothing that it could do
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_healthy(self) -> bool:
        return self._thread.is_alive() and self._stopped is None

    @property
    def step_age(self) -> float:
        """Seconds since the running step began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def longest_step(self) -> float:
        """Seconds of the longest step so far of the running step's size class."""
        return self._durations.longest(self._engine.planned_tokens)

    async def call(self, command: Callable[[Engine], T], undo: Callable[[Engine, T], object] | None = None) -> T:
        """Run ``command`` on the engine's thread between two steps; return its result or raise its exception.

        If the caller is cancelled after the command ran, ``undo`` gets its result on the engine's thread. Raises
        EngineStopped if the thread ends before.
        """
        call = _Call(command, undo, self._event_loop.create_future())
        self._enqueue(call)
        try:
            result: T = await call.future
        except asyncio.CancelledError:
            if not call.future.cancelled():  # the answer was set and is lost
                call.undo_if_cancelled(self)
            raise
        return result

    def post(self, command: Command, then: Callable[[], object] = lambda: None) -> None:
        """Run ``command`` between two steps, without waiting; dropped if the thread has ended.

        An exception of it crashes the engine: there is no caller to handle it.
        ``then`` is called on the event loop once the command ran or was dropped, after ``on_step`` of its step.
        """
        future = self._event_loop.create_future()
        future.add_done_callback(lambda done: (done.exception(), then()))
        try:
            self._enqueue(_Call(command, None, future, is_posted=True))
        except EngineStopped as stopped:
            future.set_exception(stopped)

    def _enqueue(self, call: _Call) -> None:
        with self._condition:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.append(call)
            self._condition.notify()

    async def stop(self) -> None:
        """Stop the thread after the running step. Raises TimeoutError after ``STOP_SECONDS``."""
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
                woke = time.monotonic()
                batch = self._take_batch()
                for call in batch:
                    call.run(self._engine)
                for call in batch:
                    call.raise_without_caller()
                if self._engine.committed_output is not None:  # what a command committed is older than its answer
                    self._deliver([], self._engine.step())
                if self._engine.has_work:
                    batch = self._answer(batch)
                self._step_began = began = time.monotonic()
                output = self._engine.step()
                self._step_began = None
                if output.num_tokens:
                    self._durations.note(output.num_tokens, time.monotonic() - began)
                self._stalled = not (output.num_tokens or output.ended)
                self._deliver(batch, output)
                batch = []
                if output.num_tokens:
                    self.busy_steps += 1
                    self.busy_seconds += time.monotonic() - woke
                    self.busy_tokens += output.num_tokens
        except Exception as error:  # noqa: BLE001 - every pending caller must be answered
            stopped = EngineStopped(f"the engine crashed: {type(error).__name__}: {error}")
            stopped.__cause__ = error
        finally:
            self._end(batch, stopped)

    def _wait(self) -> bool:
        with self._condition:
            self._condition.wait_for(
                lambda: self._inbox or self._stopping or (self._engine.has_work and not self._stalled)
            )
            return not self._stopping

    def _take_batch(self) -> list[_Call]:
        with self._condition:
            batch, self._inbox = self._inbox, []
        return [call for call in batch if not call.future.cancelled()]

    def _answer(self, batch: list[_Call]) -> list[_Call]:
        awaited = [call for call in batch if not call.is_posted]
        if awaited:

            def on_event_loop() -> None:
                for call in awaited:
                    call.answer(self)

            self._post(on_event_loop)
        return [call for call in batch if call.is_posted]

    def _deliver(self, batch: list[_Call], output: StepOutput) -> None:
        def on_event_loop() -> None:
            for call in batch:
                call.answer(self)
            self._on_step(output)

        self._post(on_event_loop)

    def _end(self, batch: list[_Call], stopped: EngineStopped) -> None:
        with self._condition:
            self._stopped = stopped
            pending, self._inbox = self._inbox, []
        self._step_began = None
        for call in pending:
            call.error = stopped

        def on_event_loop() -> None:
            for call in (*batch, *pending):
                call.answer(self)
            if stopped.__cause__ is not None:
                self._on_crash(stopped)

        self._post(on_event_loop)

    def _post(self, callback: Callable[[], None]) -> None:
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(callback)
