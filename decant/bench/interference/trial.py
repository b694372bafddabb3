from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from decant.bench.errors import InvalidBenchmark
from decant.bench.interference.configurations import InterferenceOptions
from decant.client.async_client import AsyncClient
from decant.protos import inference_pb2 as pb

RUNNING_PROMPT = 64
SETTLED, BEFORE = 8, 32
"""Tokens of each answer before the measurement, then before the send."""
LONG_OUTPUT = 8


@dataclass(frozen=True)
class Trial:
    """Result of a trial in seconds. Gaps are (end after the send, duration); those of `during` overlap `window`, from
    the send to the prompt's second token.
    """

    ttft: float
    window: float
    before: Sequence[tuple[float, float]]
    during: Sequence[tuple[float, float]]
    before_rate: float
    during_rate: float


@dataclass(frozen=True)
class Stamps:
    running: Sequence[Sequence[float]]
    settled: float
    sent: float
    long: Sequence[float]


async def measure(client: AsyncClient, options: InterferenceOptions, number: int) -> Trial:
    model = await client.model("")
    check(model, options)
    async with asyncio.timeout(options.timeout):
        return summarise(await _stamps(client, model, options, Random(f"{options.seed}/{number}")))


def check(model: pb.Model, options: InterferenceOptions) -> None:
    longest = options.prompt_tokens + LONG_OUTPUT
    if model.max_context_length and longest > model.max_context_length:
        limit = f"at most {model.max_context_length - LONG_OUTPUT:,} (context length of {model.id})"
        raise InvalidBenchmark("--prompt-tokens", limit, f"{options.prompt_tokens:,}")


def summarise(stamps: Stamps) -> Trial:
    sent, until = stamps.sent, stamps.long[1]
    gaps = [(begin, end) for tokens in stamps.running for begin, end in pairwise(tokens)]
    ends = [end for tokens in stamps.running for end in tokens]
    return Trial(
        ttft=stamps.long[0] - sent,
        window=until - sent,
        before=[(end - sent, end - begin) for begin, end in gaps if begin >= stamps.settled and end <= sent],
        during=[(end - sent, end - begin) for begin, end in gaps if end > sent and begin < until],
        before_rate=sum(stamps.settled < end <= sent for end in ends) / (sent - stamps.settled),
        during_rate=sum(sent < end <= until for end in ends) / (until - sent),
    )


async def _stamps(client: AsyncClient, model: pb.Model, options: InterferenceOptions, rng: Random) -> Stamps:
    def prompt(length: int) -> list[int]:
        return [rng.randrange(model.vocab_size) for _ in range(length)]

    running: list[list[float]] = [[] for _ in range(options.running)]
    output = model.max_context_length - RUNNING_PROMPT
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(_receive(client, prompt(RUNNING_PROMPT), output, tokens)) for tokens in running]
        for task in tasks:
            stack.push_async_callback(_cancel, task)
        await _until(running, SETTLED, tasks)
        settled = time.monotonic()
        await _until(running, max(map(len, running)) + BEFORE, tasks)
        long: list[float] = []
        sent = time.monotonic()
        await _receive(client, prompt(options.prompt_tokens), LONG_OUTPUT, long)
        _check_running(tasks, output)
    return Stamps(running, settled, sent, long)


async def _receive(client: AsyncClient, prompt: Sequence[int], output: int, tokens: list[float]) -> None:
    stream = client.stream(prompt, max_tokens=output, ignore_eos=True)
    async with stream:
        async for delta in stream:
            tokens += [time.monotonic()] * delta.num_tokens


async def _until(running: Sequence[Sequence[float]], count: int, tasks: Sequence[asyncio.Task[None]]) -> None:
    while min(map(len, running)) < count:
        _check_running(tasks, count)
        await asyncio.sleep(0.005)


def _check_running(tasks: Sequence[asyncio.Task[None]], output: int) -> None:
    for task in tasks:
        if task.done():
            task.result()
            limit = f"a prompt that is computed before the running answers end, at {output:,} tokens"
            raise InvalidBenchmark("--prompt-tokens", limit, "a longer one")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
