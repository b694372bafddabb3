from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import redis as sync_redis

from decant import models as trained
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.protos import worker_pb2 as wire
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from decant.state.urls import SCHEMES
from tests.e2e.fork_server import Forked, completed
from tests.router.factories import tiny
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import PATIENCE

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
MODEL = str(trained.path())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--models or DECANT_MODELS: is needed"),
        (("--models", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--models", MODEL, "--flush-ms", "0"), "--flush-ms"),
        (("--models", MODEL, "--redis-url", "http://x"), "decant router: --redis-url: begins with one of"),
        (("--models", MODEL, "--redis-url", "redis://:secret@h:x"), "--redis-url: host:port with a port from 0 to"),
        (("--models", MODEL, "--advertise", "nowhere"), "decant router: --advertise: host:port"),
        (("--models", MODEL, "--peer-ca", "/no/such/file"), "decant router: --peer-ca: "),
        (("--models", MODEL, "--credentials", "/no/such/file"), "/no/such/file: a readable TOML file"),
        (("--models", MODEL, "--queue-limt=3"), "did you mean --queue-limit?"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    ended = completed("decant.router", *arguments, timeout=PATIENCE)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_bad_redis_url_is_named_as_it_was_given_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "router.toml"
    file.write_text('redis_url = "ftp://:secret@x"')
    limit = f"begins with one of {', '.join(SCHEMES)}, got ftp"
    ended = completed("decant.router", "--models", MODEL, "--config", str(file), timeout=PATIENCE)
    assert ended.stderr == f"decant router: {file}: redis_url: {limit}\n"
    monkeypatch.setenv("DECANT_REDIS_URL", "ftp://:secret@x")
    ended = completed("decant.router", "--models", MODEL, timeout=PATIENCE)
    assert ended.stderr == f"decant router: DECANT_REDIS_URL: {limit}\n"


@pytest.mark.slow
def test_an_interpreter_that_is_refused_ends_with_the_same_line() -> None:
    arguments = ("--models", MODEL, "--flush-ms", "0")
    command = [sys.executable, "-m", "decant.router", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == completed("decant.router", *arguments, timeout=PATIENCE).stderr


@dataclass
class Running:
    process: Forked
    stdout: asyncio.StreamReader
    address: str
    lines: list[dict[str, object]]
    admin_port: int | None = None

    async def line(self, event: str) -> dict[str, object]:
        async with asyncio.timeout(PATIENCE):
            while True:
                raw = await self.stdout.readline()
                assert raw, f"the router ended before {event!r}: {self.lines}"
                line: dict[str, object] = json.loads(raw)
                self.lines.append(line)
                if line["event"] == event:
                    return line


@asynccontextmanager
async def router(server: PrivateRedis, *arguments: str) -> AsyncIterator[Running]:
    words = ["--models", f"m={MODEL}", "--port", "0", "--redis-url", server.url, "--handoff-min-tokens", "0"]
    words += ["--stream-keepalive-seconds", "60"]  # a busy machine changes no stream
    stdout = asyncio.StreamReader(limit=1 << 20)
    out, written = os.pipe()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(out, "rb"))
    try:
        # In a thread: the first one starts what all are forked from, for seconds.
        process = await asyncio.to_thread(Forked, "decant.router", [*words, *arguments], written, 2)
    finally:
        os.close(written)
    try:
        running = Running(process, stdout, "", [])
        serving = await running.line("serving")
        running.address, port = str(serving["address"]), serving["admin_port"]
        running.admin_port = port if isinstance(port, int) else None
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await asyncio.to_thread(process.wait)
        transport.close()


async def become_ready(running: Running) -> None:
    while (await running.line("readiness"))["state"] != "ready":
        pass


def usable(workers: list[FakeWorker]) -> list[FakeWorker]:
    for worker in workers:
        worker.registration.token_ids = min(tiny().hashes)
    return workers


def generate_request(count: int = 5) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        token_ids=pb.TokenIds(ids=[1, 2, 3]),
        stopping=pb.StoppingParams(max_tokens=count, ignore_eos=True),
        response=pb.ResponseOptions(token_ids=True, text=False),
    )


@pytest.mark.slow
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_a_router_on_every_address_registers_its_host_name(server: PrivateRedis, store: Store, host: str) -> None:
    async with router(server, "--host", host) as running:
        await become_ready(running)
        (entry,) = (await store.routers.listing()).present
        assert entry.registration.address == f"{socket.gethostname()}:{running.address.rpartition(':')[2]}"


@pytest.mark.slow
async def test_a_client_is_answered_through_both_pools_and_the_router_drains(
    server: PrivateRedis, store: Store
) -> None:
    async with fleet(P, D) as workers:
        for worker in usable(workers):
            await store.workers.register(worker.registration)
        workers[1].script.pause_at = 3
        async with router(server, "--id", "one", "--balance-pools") as running:
            await become_ready(running)
            (present,) = (await store.routers.listing()).present
            assert (present.registration.peer.id, present.registration.address) == ("one", running.address)
            async with grpc.aio.insecure_channel(running.address) as channel:
                stub = services.InferenceServiceStub(channel)
                call = stub.GenerateStream(generate_request())
                ids: list[int] = []
                while len(ids) < 3:
                    ids += (await call.read()).delta.token_ids
                running.process.send_signal(signal.SIGTERM)
                await running.line("shutdown")
                assert (await running.line("readiness"))["state"] == "draining"
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(generate_request())
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                workers[1].go.set()
                last = None
                while (message := await call.read()) is not grpc.aio.EOF:
                    ids += message.delta.token_ids if message.HasField("delta") else []
                    last = message
                assert ids == answer([1, 2, 3], 5)
                assert last is not None
                assert last.receipt.prefill_worker == "p"
                assert last.receipt.decode_worker == "d"
            async with asyncio.timeout(PATIENCE):
                assert await asyncio.to_thread(running.process.wait, PATIENCE) == 0
        assert not (await store.routers.listing()).present


@pytest.mark.slow
async def test_a_router_without_workers_is_ready_and_refuses_requests(server: PrivateRedis, store: Store) -> None:
    async with router(server) as running:
        await become_ready(running)
        async with grpc.aio.insecure_channel(running.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await services.InferenceServiceStub(channel).Generate(generate_request())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_a_router_without_requests_reports_an_outage_of_the_store(
    server: PrivateRedis, bare: sync_redis.Redis
) -> None:
    async with router(server) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub = services.InferenceServiceStub(channel)

        async def reports(available: bool) -> None:
            async with asyncio.timeout(PATIENCE):
                while True:
                    info = await stub.GetServerInfo(pb.GetServerInfoRequest())
                    if info.state_store_available is available:
                        break
                    await asyncio.sleep(0.05)

        await become_ready(running)
        await reports(available=True)
        bare.client_pause(60_000, all=False)
        await reports(available=False)
        bare.client_unpause()
        await reports(available=True)


async def page(port: object, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(str(port)))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE):
        text = (await reader.read()).decode()
    writer.close()
    return text


def ready_workers(metrics: str) -> dict[str, float]:
    name = 'decant_ready_workers{model="m",role="'
    lines = [line.removeprefix(name).split('"} ') for line in metrics.splitlines() if line.startswith(name)]
    return {role: float(count) for role, count in lines}


async def test_workers_that_take_requests_are_counted_by_model_and_role(server: PrivateRedis, store: Store) -> None:
    async with fleet(P) as workers, router(server, "--admin-port", "0") as running:
        port = running.admin_port
        await become_ready(running)
        assert "200 OK" in await page(port, "/ready"), "a router is ready without workers"
        assert ready_workers(await page(port, "/metrics")) == {"prefill": 0, "decode": 0}
        (worker,) = usable(workers)
        await store.workers.register(worker.registration)
        for role, counts in ((P[1], {"prefill": 1, "decode": 0}), (D[1], {"prefill": 0, "decode": 1})):
            worker.load.role = role
            async with asyncio.timeout(PATIENCE):
                while True:
                    if ready_workers(await page(port, "/metrics")) == counts:
                        break
                    await asyncio.sleep(0.01)


async def test_gateways_find_the_load_of_a_models_workers_under_vllms_names(server: PrivateRedis, store: Store) -> None:
    async with fleet(P, D) as workers, router(server, "--admin-port", "0", "--gateway-metrics") as running:
        await become_ready(running)
        for worker, free in zip(usable(workers), (900, 600), strict=True):
            worker.load.free_blocks = free
            await store.workers.register(worker.registration)
        line = 'vllm:kv_cache_usage_perc{model_name="m"} 0.25'
        async with asyncio.timeout(PATIENCE):
            while True:
                text = await page(running.admin_port, "/metrics")
                if line in text:
                    break
                await asyncio.sleep(0.01)
        assert 'vllm:num_requests_waiting{model_name="m"} 0.0' in text
        assert 'decant_kv_cache_usage_ratio{model="m"} 0.25' in text


@pytest.mark.slow
def test_a_router_imports_nothing_that_computes() -> None:
    program = (
        "import sys, decant.router.main; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'engine', 'handoff') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
