from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from statistics import median
from types import TracebackType
from typing import Self

from decant.bench.calibration.costs import StepSample
from decant.client.async_client import AsyncClient
from decant.protos import inference_pb2 as pb

_SETTLED = 4
"""Tokens of each answer before its steps count."""
_POLL_SECONDS = 0.005


class RunningAnswers:
    """Answers that run until the end of the ``async with``."""

    def __init__(self, client: AsyncClient, model: pb.Model, count: int, prompt_tokens: int, seed: int) -> None:
        rng = Random(seed)
        self._prompts = [[rng.randrange(model.vocab_size) for _ in range(prompt_tokens)] for _ in range(count)]
        self._output = model.max_context_length - prompt_tokens
        self._prompt_tokens = prompt_tokens
        self._client = client
        self._tokens: list[list[float]] = [[] for _ in range(count)]  # when each arrived
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        pairs = zip(self._prompts, self._tokens, strict=True)
        self._tasks = [asyncio.create_task(self._receive(prompt, tokens)) for prompt, tokens in pairs]
        try:
            await self.wait_for_more(_SETTLED)
        except BaseException:
            await self._cancel()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._cancel()

    async def wait_for_more(self, tokens: int) -> None:
        goals = [len(arrived) + tokens for arrived in self._tokens]
        while any(len(arrived) < goal for arrived, goal in zip(self._tokens, goals, strict=True)):
            self.check()
            await asyncio.sleep(_POLL_SECONDS)

    def step(self, times: Sequence[float]) -> StepSample:
        means = []
        for begin, end in pairwise(times):
            steps = sum(begin < at <= end for arrived in self._tokens for at in arrived) / len(self._tokens)
            means.append((end - begin) / steps if steps else end - begin)
        before = sum(at <= times[len(times) // 2] for arrived in self._tokens for at in arrived) / len(self._tokens)
        return StepSample(len(self._tokens), round(self._prompt_tokens + before), median(means))

    async def _receive(self, prompt: Sequence[int], arrived: list[float]) -> None:
        while True:  # one that fills the context begins again
            async with self._client.stream(prompt, max_tokens=self._output, ignore_eos=True) as stream:
                async for delta in stream:
                    arrived += [time.monotonic()] * delta.num_tokens

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
