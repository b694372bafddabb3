from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from decant.bench.errors import InvalidBenchmark, InvalidTarget
from decant.bench.records import Record
from decant.bench.reports import verdict
from decant.bench.reports.figures import details, summarise
from decant.bench.traffic.arrivals import ramp_arrivals, random_arrivals
from decant.bench.traffic.lengths import Lengths, Uniform, parse_lengths
from decant.bench.traffic.load import Load
from decant.bench.traffic.sweep import sweep
from decant.bench.traffic.workload import (
    ANYSCALE,
    BenchRequest,
    SharedPrefix,
    Turns,
    prompts,
    random_requests,
    read_sharegpt,
    read_trace,
)
from decant.client.async_client import AsyncClient
from decant.client.channel import Tls
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import InvalidArgument

SLO_NAMES = ("ttft", "tpot", "e2el")
Notify = Callable[[str, Record | None, int], None]
"""Gets a run's name, a record (None at its begin), and the number of requests."""


def fresh_seed() -> int:
    """Draw a seed: with that of an earlier call, workers would have its prompts in their prefix caches."""
    return secrets.randbelow(1 << 31)


@dataclass(frozen=True)
class BenchOptions:
    """Options of `decant bench`, `slos` in seconds. Without `rate`, `concurrency` and `trace` all requests are sent at
    once. With `multi_turn`, `requests` counts conversations.
    """

    model: str = ""
    workload: str = "random"
    dataset: Path | None = None
    trace: bool = False
    multi_turn: bool = False
    prompt_tokens: str = "128"
    output_tokens: str = "64"
    prefix: SharedPrefix = field(default_factory=SharedPrefix)
    requests: int = 64
    rate: float | None = None
    ramp_to: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    sweep: bool = False
    warm_up: int = 4
    slos: Mapping[str, float] = field(default_factory=dict)
    timeout: float = 600.0
    seed: int = field(default_factory=fresh_seed)


@dataclass(frozen=True)
class Target:
    address: str | Sequence[str]
    tls: Tls | None = None
    token: str | None = None


@dataclass(frozen=True)
class Result:
    """Documents of the runs, ordered by rate, and a sentence about them."""

    runs: Sequence[dict[str, Any]]
    sentence: str


def check(options: BenchOptions) -> None:
    """Raise InvalidBenchmark for options that are invalid or exclude each other."""
    if options.workload not in ("random", "anyscale"):
        raise InvalidBenchmark("--workload", "random or anyscale", options.workload)
    if options.workload == "anyscale" and options.dataset is not None:
        raise InvalidBenchmark("--dataset", "no --workload beside it", options.workload)
    if options.rate is not None and options.concurrency is not None:
        raise InvalidBenchmark("--rate, --concurrency", "one of them", "both")
    if options.sweep and (options.rate is None or not options.slos):
        raise InvalidBenchmark("--sweep", "with --rate, where it begins, and --slo", "without")
    if options.ramp_to is not None and (options.rate is None or options.sweep):
        raise InvalidBenchmark("--ramp-to", "with --rate, where it begins, and without --sweep", options.ramp_to)
    if options.multi_turn and (options.dataset is None or options.dataset.suffix != ".json"):
        raise InvalidBenchmark(
            "--multi-turn", "with --dataset and conversations of ShareGPT (.json)", str(options.dataset)
        )
    if options.trace and (options.dataset is None or options.dataset.suffix == ".json"):
        raise InvalidBenchmark("--trace", "with --dataset and a file of JSON lines", str(options.dataset))
    if options.trace and (options.rate is not None or options.concurrency is not None):
        raise InvalidBenchmark("--trace", "no --rate and no --concurrency beside it", "both")
    parse_lengths("--prompt-tokens", options.prompt_tokens)
    parse_lengths("--output-tokens", options.output_tokens)


async def run(target: Target, options: BenchOptions, notify: Notify, runs: list[dict[str, Any]]) -> Result:
    """Measure a deployment. `runs` receives each run at its end: the caller has them if a sweep is interrupted. Raises
    InvalidBenchmark and ServiceError.
    """
    check(options)
    async with _client(target) as client:
        model = await client.model(options.model)
        if not model.vocab_size:
            raise InvalidBenchmark("model", "a vocabulary size, which a ready worker reports", "none")
        requests = await _requests(client, model, options)
        bench = _Benchmark(client, model, options, requests, notify)
        await bench.warm_up()

        async def measure(rate: float | None) -> dict[str, Any]:
            runs.append(await bench.measure(rate))
            return runs[-1]

        if options.sweep and options.rate is not None:
            await sweep(options.rate, measure, lambda one: not verdict.missed(one, options.slos))
        else:
            await measure(options.rate)
    return result_of(runs, options)


def result_of(runs: Sequence[dict[str, Any]], options: BenchOptions) -> Result:
    ordered = sorted(runs, key=lambda one: float(one["request_rate"]))
    return Result(ordered, verdict.sentence(ordered, options.slos))


def _client(target: Target) -> AsyncClient:
    try:
        return AsyncClient(target.address, tls=target.tls, token=target.token)
    except (OSError, ValueError) as error:
        raise InvalidTarget(str(error)) from None


class RequestSource:
    """Requests of each run. Later runs of a sweep last as long as the first; their random prompts are new, as earlier
    ones may be cached.
    """

    def __init__(self, model: pb.Model, options: BenchOptions, first: Sequence[BenchRequest]) -> None:
        self._model = model
        self._options = options
        self._first = first
        self._runs = 0

    def take(self, rate: float | None) -> Sequence[BenchRequest]:
        options, run = self._options, self._runs
        self._runs += 1
        if not run or rate is None or options.rate is None:
            return self._first
        count = round(len(self._first) * rate / options.rate)
        if options.dataset is None:
            return _random(self._model, replace(options, requests=count), f"{options.seed}/run {run}")
        return list(islice(cycle(self._first), count))


class _Benchmark:
    def __init__(
        self,
        client: AsyncClient,
        model: pb.Model,
        options: BenchOptions,
        requests: Sequence[BenchRequest],
        notify: Notify,
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._requests = requests
        self._source = RequestSource(model, options, requests)
        self._notify = notify

    async def warm_up(self) -> None:
        size, options = self._model.vocab_size, self._options
        for index, request in enumerate(self._requests[: options.warm_up]):
            length = len(request.prompt) if not isinstance(request.prompt, str) else 16
            lengths = (Uniform(length, length), Uniform(request.output_len, request.output_len))
            warm = random_requests(1, size, lengths, SharedPrefix(), f"{options.seed}/warm-up {index}")
            (record,) = await self._load("warm-up", min(options.warm_up, len(self._requests))).closed(warm, 1)
            if record.error:
                raise InvalidBenchmark("warm-up", "requests that succeed", record.error)

    async def measure(self, rate: float | None) -> dict[str, Any]:
        options, requests = self._options, self._source.take(rate)
        name = f"{rate:.3g} requests/s" if rate else f"{options.concurrency or len(requests)} at a time"
        name = "times of the trace" if options.trace else name
        count = sum(request.turns for request in requests)
        load = self._load(name, count)
        self._notify(name, None, count)
        if options.concurrency is not None:
            records = await load.closed(requests, options.concurrency)
        else:
            records = await load.open(requests, self._arrivals(requests, rate))
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "backend": "decant",
            "endpoint_type": "decant",
            "label": None,
            "seed": options.seed,
            "model_id": self._model.id,
            "tokenizer_id": self._model.id,
            "num_prompts": count,
            "request_rate": float("inf") if rate is None else rate,
            "ramp_to": options.ramp_to,
            "trace": options.trace,
            "burstiness": options.burstiness,
            "max_concurrency": options.concurrency,
            "not_sent": count - len(records),
            **summarise(records, options.slos),
            **details(records),
        }

    def _arrivals(self, requests: Sequence[BenchRequest], rate: float | None) -> Sequence[float]:
        options = self._options
        if rate is not None and options.ramp_to is not None:
            return ramp_arrivals(len(requests), (rate, options.ramp_to), options.burstiness, options.seed)
        if rate is not None:
            return random_arrivals(len(requests), rate, options.burstiness, options.seed)
        return [request.arrival_s if options.trace else 0.0 for request in requests]

    def _load(self, name: str, count: int) -> Load:
        return Load(
            self._client, self._options.model, self._options.timeout, lambda one: self._notify(name, one, count)
        )


async def _requests(client: AsyncClient, model: pb.Model, options: BenchOptions) -> list[BenchRequest]:
    path = options.dataset
    if path is None:
        return _random(model, options, options.seed)
    if path.suffix != ".json":
        return read_trace(path, model.vocab_size, model.max_context_length or None)[: options.requests]
    conversations = read_sharegpt(path)[: options.requests]
    requests = [await _conversation(client, model, options, turns) for turns in conversations]
    if not any(requests):
        limit = f"a first question and answer of at most {model.max_context_length:,} tokens (context length)"
        raise InvalidBenchmark("--dataset", limit, "none")
    return [one for one in requests if one is not None]


async def _conversation(
    client: AsyncClient, model: pb.Model, options: BenchOptions, turns: Turns
) -> BenchRequest | None:
    requests = []
    chosen = turns if options.multi_turn else turns[:1]
    for prompt, (_, answer) in zip(prompts(chosen), chosen, strict=True):
        try:
            lengths = [(await client.tokenize(text, model=options.model)).count for text in (prompt, answer)]
        except InvalidArgument:  # so long that it is not even counted
            break
        if model.max_context_length and sum(lengths) > model.max_context_length:
            break
        requests.append(BenchRequest(prompt, lengths[1]))
    return replace(requests[0], follow_ups=requests[1:]) if requests else None


def _random(model: pb.Model, options: BenchOptions, seed: int | str) -> list[BenchRequest]:
    lengths: tuple[Lengths, Lengths] = ANYSCALE
    if options.workload == "random":
        prompt, output = options.prompt_tokens, options.output_tokens
        lengths = parse_lengths("--prompt-tokens", prompt), parse_lengths("--output-tokens", output)
    longest = options.prefix.tokens + sum(one.high for one in lengths)
    if model.max_context_length and longest > model.max_context_length:
        limit = f"at most {model.max_context_length:,} with the output (context length of {model.id})"
        raise InvalidBenchmark("prompt tokens", limit, f"{longest:,}")
    return random_requests(options.requests, model.vocab_size, lengths, options.prefix, seed)


def parse_slos(text: str) -> dict[str, float]:
    """Parse "ttft=500ms,tpot=50ms" to seconds. Raises InvalidBenchmark."""
    slos: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        number, scale = (value[:-2], 1e-3) if value.endswith("ms") else (value.removesuffix("s"), 1.0)
        try:
            slos[name] = float(number) * scale
        except ValueError:
            slos[name] = 0.0
        if name not in SLO_NAMES or not 0 < slos[name] < float("inf"):
            raise InvalidBenchmark("--slo", "such as ttft=500ms,tpot=50ms,e2el=10s", part)
    return slos
