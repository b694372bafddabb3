from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import ceil
from statistics import median
from typing import Any

from decant.bench.calibration.costs import PromptSample, Samples, StepSample, costs
from decant.bench.calibration.running_answers import RunningAnswers
from decant.bench.errors import InvalidBenchmark
from decant.bench.records import Record
from decant.bench.traffic.lengths import Uniform
from decant.bench.traffic.load import Load
from decant.bench.traffic.workload import SharedPrefix, random_requests
from decant.client.async_client import AsyncClient
from decant.protos import inference_pb2 as pb

SHORT_CONTEXT = 64
LARGEST_BATCH = 16
_LONE, _QUEUED = 5, 16
_CLIENTS = 3
"""Clients that keep a queue: one prompt is computed, and another one waits even while a client sends its next."""
_CLIENTS_OF_HANDOFFS = 8
"""Clients whose prompts are handed off while others always wait: a handoff may take as long as several prefills."""
_PARTS, _STEPS = 5, 8

Notify = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CalibrationOptions:
    """Lengths to calibrate for: `prompt_tokens` of the longest prompt, `output_tokens` of the mean output."""

    prompt_tokens: int = 2000
    output_tokens: int = 500
    timeout: float = 600.0
    seed: int = 0

    @property
    def lengths(self) -> tuple[int, int, int]:
        longest = self.prompt_tokens
        return max(1, longest // 4), max(1, longest // 2), longest

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.output_tokens // 2


async def measure(client: AsyncClient, options: CalibrationOptions, notify: Notify) -> dict[str, Any]:
    """Measure a deployment of one prefill and one decode worker. Raises InvalidBenchmark and ServiceError."""
    model = await client.model("")
    if model.max_context_length and options.prompt_tokens + options.output_tokens > model.max_context_length:
        limit = f"at most {model.max_context_length:,} with the output (context length of {model.id})"
        raise InvalidBenchmark("--prompt-tokens", limit, options.prompt_tokens + options.output_tokens)
    samples = await _Calibration(client, model, options, notify).samples()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": model.id,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        **costs(samples),
        "samples": asdict(samples),
    }


class _Calibration:
    def __init__(self, client: AsyncClient, model: pb.Model, options: CalibrationOptions, notify: Notify) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._load = Load(client, "", options.timeout, lambda record: None)
        self._notify = notify
        self._seed = options.seed

    async def samples(self) -> Samples:
        lengths = self._options.lengths
        parts = 7
        self._notify("warm-up", 0, parts)
        await self._alone(lengths[-1], 1)
        self._notify("prompts one at a time", 1, parts)
        alone = [record for length in lengths for record in await self._alone(length, _LONE)]
        self._notify("prompts in a queue", 2, parts)
        prefills = [await self._queue(length) for length in lengths]
        steps: list[StepSample] = []
        one = await self._steps(1, self._options.context)
        batch = self._batch(prefills[-1].seconds, one.seconds)
        for number, (count, context) in enumerate(self._scenes(batch)):
            self._notify(f"{count} running answers", 3 + number, parts)
            steps.append(await self._steps(count, context))
        self._notify("both", 6, parts)
        beside, both = await self._both(batch, prefills[-1], steps[-1])
        self._notify("done", parts, parts)
        return Samples(
            lone=[PromptSample(record.prompt_tokens, record.ttft) for record in alone],
            prefills=prefills,
            steps=[one, *steps],
            handoffs=[record.tokens[1] - record.tokens[0] for record in alone if record.prompt_tokens == lengths[-1]],
            beside=beside,
            both=both,
        )

    def _batch(self, prefill: float, step: float) -> int:
        """Return the number of running answers by Little's law; costs are fitted up to this number."""
        running = self._options.output_tokens * step / prefill
        return min(max(2, ceil(running)), LARGEST_BATCH)

    def _scenes(self, batch: int) -> Sequence[tuple[int, int]]:
        context = self._options.context
        return (batch, min(SHORT_CONTEXT, context)), (ceil(batch / 2), context), (batch, context)

    async def _alone(self, tokens: int, count: int) -> list[Record]:
        return await self._send(tokens, count, 2, 1)

    async def _queue(self, tokens: int) -> PromptSample:
        records = await self._send(tokens, _QUEUED, 1, _CLIENTS)
        return PromptSample(tokens, _interval([record.tokens[0] for record in records]))

    async def _steps(self, count: int, context: int) -> StepSample:
        prompt = max(1, context - _PARTS * _STEPS // 2)
        async with RunningAnswers(self._client, self._model, count, prompt, self._next_seed()) as answers:
            times = [time.monotonic()]
            for _ in range(_PARTS):
                await answers.wait_for_more(_STEPS)
                times.append(time.monotonic())
            return answers.step(times)

    async def _both(
        self, batch: int, prefill: PromptSample, step: StepSample
    ) -> tuple[PromptSample, tuple[PromptSample, StepSample, float]]:
        """Measure prompts beside running answers, first without handoffs, then with them."""
        tokens, count = self._options.lengths[-1], _QUEUED
        async with RunningAnswers(self._client, self._model, batch, tokens, self._next_seed()) as answers:
            beside = await self._queue(tokens)
            handed_off = await self._handed_off(tokens)
            answers.check()
        meanwhile = count * prefill.seconds / step.seconds  # steps; contexts are about as those of steps alone
        context = max(SHORT_CONTEXT, round(self._options.context - meanwhile / 2))
        async with RunningAnswers(self._client, self._model, batch, context, self._next_seed()) as answers:
            records = await self._send(tokens, count, 2, _CLIENTS)
            answers.check()
            firsts = sorted(record.tokens[0] for record in records)[: 1 - _CLIENTS]
            slowed = answers.step(_parts(firsts[0], firsts[-1]))
        pause = median(record.tokens[1] - record.tokens[0] for record in records)
        return beside, (handed_off, slowed, pause)

    async def _handed_off(self, tokens: int) -> PromptSample:
        records = await self._send(tokens, 3 * _CLIENTS_OF_HANDOFFS, 2, _CLIENTS_OF_HANDOFFS)
        firsts = sorted(record.tokens[0] for record in records)[: 1 - _CLIENTS_OF_HANDOFFS]  # others follow on these
        return PromptSample(tokens, _interval(firsts))

    async def _send(self, tokens: int, count: int, output: int, clients: int) -> list[Record]:
        lengths = Uniform(tokens, tokens), Uniform(output, output)
        requests = random_requests(count, self._model.vocab_size, lengths, SharedPrefix(), self._next_seed())
        records = await self._load.closed(requests, clients)
        for record in records:
            if record.error:
                raise InvalidBenchmark("calibration", "requests that succeed", record.error)
        return records

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def _parts(begin: float, end: float) -> Sequence[float]:
    return [begin + (end - begin) * part / _PARTS for part in range(_PARTS + 1)]


def _interval(times: Sequence[float]) -> float:
    """Return the mean seconds between successive times: a step may complete several prompts, or none."""
    return (max(times) - min(times)) / (len(times) - 1)
