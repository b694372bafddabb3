"""A worker that has been idle computes one token of its own, so that a fault takes it out before a request meets it.

idle for ``idle_s`` --> one request in the engine --its token, as at the first trial--> idle
                                     '-- no step for ``limit_s``, a failure, another token: ``fail(reason)``

It is no run of a router: no tenant, quota or result counts it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decant.engine.engine import Engine
from decant.engine.errors import EngineStopped
from decant.engine.output import StepOutput
from decant.engine.request import FinishReason, Request, StopParams
from decant.worker.engine_host import EngineHost

TRIAL = "health-trial"
"""Id of its sequence."""
PROMPT_TOKENS = 8
LIMIT_S = 60.0
"""Longest time without a step while the trial waits for its token: many times that of the longest step."""


class HealthTrial:
    def __init__(self, host: EngineHost, fail: Callable[[str], None], idle_s: float, limit_s: float = LIMIT_S) -> None:
        self._host = host
        self._fail = fail
        self._idle_s = idle_s
        self._limit_s = limit_s
        self._now = asyncio.get_running_loop().time
        self._last_step = self._now()
        self._timeout: asyncio.Timeout | None = None
        self._ended: asyncio.Future[str] | None = None
        self._token: int | None = None
        self._expected: int | None = None

    async def run(self) -> None:
        """Try the engine whenever it has been idle, until it fails or is cancelled."""
        self._host.steps.subscribe(self._on_step)
        self._host.crashes.subscribe(self._on_crash)
        try:
            reason = ""
            while not reason:
                await asyncio.sleep(max(0.0, self._last_step + self._idle_s - self._now()))
                if self._now() >= self._last_step + self._idle_s:
                    reason = await self._try()
            self._fail(reason)
        except EngineStopped:
            pass  # the worker ends
        finally:
            self._host.steps.unsubscribe(self._on_step)
            self._host.crashes.unsubscribe(self._on_crash)

    async def _try(self) -> str:
        """Compute a token; return what is wrong, or nothing."""
        self._ended = ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._limit_s) as self._timeout:
                await self._host.loop.call(self._begin)
                failure = await ended
        except TimeoutError:
            return f"the engine computed no token in {self._limit_s:g} s"
        finally:
            self._timeout = self._ended = None
            self._last_step = self._now()
        if failure:
            return f"the engine failed: {failure}"
        expected = self._expected = self._token if self._expected is None else self._expected
        if self._host.equal_bits and self._token != expected:
            return f"the engine computed token {self._token} where it computed {expected} before"
        return ""

    def _begin(self, engine: Engine) -> None:
        prompt = (0,) * max(1, min(PROMPT_TOKENS, self._host.context_length - 1))
        engine.add(Request(TRIAL, prompt, stop=StopParams(1, ignore_eos=True), use_prefix_cache=False))

    def _on_crash(self, stopped: EngineStopped) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(stopped)

    def _on_step(self, output: StepOutput) -> None:
        self._last_step = self._now()
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._last_step + self._limit_s)
        for token in output.tokens:
            if token.id == TRIAL:
                self._token = token.token
        for end in output.ended:
            if end.id == TRIAL and self._ended is not None and not self._ended.done():
                self._ended.set_result(end.detail if end.reason is FinishReason.FAILED else "")
