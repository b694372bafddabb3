from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.forkserver import ensure_running
from types import SimpleNamespace
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import router
from bench.deployment import frames, load, processes
from bench.deployment import grpc_baseline as bare
from bench.deployment.load import Job
from bench.router import GOALS, Goal, LoadFailed
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from tests.bench import fork_server as forked
from tests.ports import reserved_port

PATIENCE = 120.0


@given(st.integers(0, 10**9), st.sampled_from([0.001, 0.01, 0.025, 0.3]), st.floats(-0.2, 5))
def test_no_step_is_taken_twice_or_left_out(latest: int, step_s: float, steps_later: float) -> None:
    following = bare.next_step((latest + steps_later) * step_s, step_s, latest)
    assert latest + 1 <= following <= latest + 1 + max(0, int(steps_later + 1e-6))


@asynccontextmanager
async def server(first_ms: float, step_ms: float) -> AsyncIterator[str]:
    port = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(bare.serve(first_ms, step_ms, port.set_result))
    try:
        async with asyncio.timeout(PATIENCE):
            yield f"127.0.0.1:{await port}"
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def done(job: Job) -> tuple[list[str], dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    async with asyncio.timeout(PATIENCE):
        await load.serve(job, lambda message: messages.append(json.loads(json.dumps(message))))
    return [message["window"] for message in messages[:-1]], messages[-1]["result"]


def most_at_once(seen: list[dict[str, float]]) -> int:
    changes = sorted([(one["sent"], 1) for one in seen] + [(one["last"], -1) for one in seen])
    return max(sum(change for _, change in changes[: end + 1]) for end in range(len(changes)))


async def test_closed_clients_send_their_next_request_when_the_last_is_answered() -> None:
    async with server(20, 5) as address:
        windows, result = await done(Job("c", address, "closed", 0.5, clients=3, output_tokens=4))
    assert windows == ["begin", "end"]
    assert not result["errors"]
    assert most_at_once(result["seen"]) == 3
    assert all(one["tokens"] == one["messages"] == 4 for one in result["seen"])
    assert all(one["first"] - one["sent"] >= 0.02 and one["last"] > one["first"] for one in result["seen"])
    assert len({one["id"] for one in result["seen"]}) == len(result["seen"]) > 3


class Gated(services.InferenceServiceServicer):
    def __init__(self, count: int) -> None:
        self._count = count
        self._open = asyncio.Event()

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802
        self._count -= 1
        if self._count <= 0:
            self._open.set()
        await self._open.wait()
        await context.write(pb.GenerateStreamResponse(seq=1, delta=pb.Delta(num_tokens=1)))


@pytest.mark.slow
async def test_open_requests_begin_whatever_became_of_the_earlier_ones() -> None:
    serving = grpc.aio.server()
    services.add_InferenceServiceServicer_to_server(Gated(6), serving)
    address = f"127.0.0.1:{serving.add_insecure_port('127.0.0.1:0')}"
    await serving.start()
    try:
        first = (await done(Job("o", address, "open", 1.0, rate=40, output_tokens=1)))[1]["seen"]
        again = (await done(Job("p", address, "open", 1.0, rate=40, output_tokens=1)))[1]["seen"]
    finally:
        await serving.stop(None)
    assert all(one["tokens"] == 1 for one in first)
    assert most_at_once(first) >= 6
    assert len(first) == len(again), "the same seed, the same instants"


class Watched(load.Clients):
    latest: Watched

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.received, self.ended = asyncio.Event(), asyncio.Event()
        Watched.latest = self

    def _on_delta(self, seen: load.RequestTimes, delta: pb.Delta) -> None:
        super()._on_delta(seen, delta)
        self.received.set()

    async def _ask(self, began: asyncio.Event | None = None) -> None:
        await super()._ask(began)
        self.ended.set()

    @classmethod
    async def next_message(cls, seconds: float) -> None:
        cls.latest.received.clear()
        await cls.latest.received.wait()

    @classmethod
    async def first_end(cls, seconds: float) -> None:
        await cls.latest.ended.wait()


async def test_only_tokens_within_the_window_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "Clients", Watched)
    async with server(1, 5) as address:
        monkeypatch.setattr(load, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": Watched.next_message}))
        windows, result = await done(Job("s", address, "streams", 0.5, clients=2, output_tokens=5000))
        assert windows == ["begin", "end"]
        assert 0 < result["in_window"] < sum(one["messages"] for one in result["seen"])
        monkeypatch.setattr(load, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": Watched.first_end}))
        with pytest.raises(ValueError, match="3 tokens were written before"):
            await done(Job("s", address, "streams", 0.5, clients=2, output_tokens=3))


class NoDeployment:
    def cpu(self) -> dict[str, float]:
        return {}

    async def scripts(self) -> int:
        return 0


@pytest.mark.slow
async def test_a_load_generator_with_errors_has_no_result() -> None:
    with reserved_port() as port:
        job = Job("e", f"127.0.0.1:{port}", "closed", 0.1)
        with pytest.raises(LoadFailed, match="UNAVAILABLE"):
            await router.load(job, NoDeployment())  # type: ignore[arg-type]


@pytest.mark.slow
async def test_a_session_takes_in_what_a_scripted_worker_sends() -> None:
    assert await frames.tokens_per_second(3, 0.3, warm_s=0.05) > 0
    assert not [
        child for child in psutil.Process().children(recursive=True) if "bench.deployment.frames" in child.cmdline()
    ]


@pytest.mark.parametrize(
    ("at_least", "figure", "met"), [(False, 1, True), (False, 3, False), (True, 3, True), (True, 1, False)]
)
def test_a_goal_has_a_direction(at_least: bool, figure: float, met: bool) -> None:
    assert Goal("key", "label", "ms", 2, at_least=at_least).met(figure) is met
    assert Goal("key", "label", "ms", None, at_least=at_least).met(figure)


@pytest.mark.slow
async def test_the_whole_bench_on_a_tiny_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_running()
    before = psutil.Process().children(recursive=True)
    module_process = processes.module_process
    monkeypatch.setattr(
        processes,
        "module_process",
        # Of the gRPC baseline, the standard output is read.
        lambda *started, **streams: (module_process if streams else forked.module_process)(*started, **streams),
    )
    monkeypatch.setattr(router, "CLIENTS", (2, 4))
    monkeypatch.setattr(router, "STREAMS", 8)  # their writes outnumber those of registrations
    result = await router.measure(0.4, Console(stderr=True), settle_s=0.1, warm_s=0.05)
    figures = json.loads(json.dumps(result))["figures"]
    assert set(figures) == {goal.key for goal in GOALS}
    assert set(result["met"]) == {goal.key for goal in GOALS if goal.value is not None}
    assert all(value >= 0 for value in figures.values())
    assert figures["cpu_us_per_message"] > 0 < figures["bare_cpu_us_per_message"]
    assert 0 < figures["scripts_per_flush"] <= 2, "a stream is written at most once in a flush interval"
    assert figures["scripts_per_request"] >= 1, "every request is recorded"
    left = [child.cmdline() for child in psutil.Process().children(recursive=True) if child not in before]
    assert not [command for command in left if command[:1] == [sys.executable]]
    console = Console(record=True, width=120, file=io.StringIO())
    router.show(result, console)
    shown = console.export_text()
    assert all(goal.label in shown for goal in GOALS)
