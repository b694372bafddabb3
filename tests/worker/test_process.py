from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from decant import models
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.state.private_redis import PrivateRedis
from tests.ports import reserved_port
from tests.worker.process_harness import (
    FAKE,
    MODEL,
    PATIENCE_S,
    ROUTER,
    SMALL,
    Process,
    audit,
    channel_to,
    healthy,
    prefill,
    registered,
    release,
)

LONG_LEASE_MS = "600000"
"""Longer than a test: a ticket ends only by its release."""


@pytest.fixture
def redis() -> Iterator[PrivateRedis]:
    with PrivateRedis() as redis:
        yield redis


Run = Callable[..., Process]


@pytest.fixture
def run(redis: PrivateRedis) -> Iterator[Run]:
    started: list[Process] = []

    def start(module: Sequence[str] = FAKE, *arguments: str, whole: bool = False, **environ: str) -> Process:
        words = (*MODEL, "--redis-url", redis.url, *(arguments or SMALL))
        started.append(Process(module, *words, whole=whole, **environ))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
async def test_a_worker_without_torch_serves_and_drains(run: Run, redis: PrivateRedis) -> None:
    worker = run(whole=True)
    address = worker.ready()
    with channel_to(address) as channel:
        seen = audit(channel)
        (registration,) = await registered(redis)
        assert (registration.peer, registration.address, registration.role) == (seen.worker, address, wire.ROLE_DECODE)
        capacity = registration.capacity
        assert registration.equal_bits, "on a CPU that was measured"
        assert (capacity.total_blocks, capacity.block_size, capacity.max_context_length) == (512, 16, 8192)
        assert (capacity.max_running, registration.model) == (256, models.path().name)
        assert registration.tokenizer
        assert registration.layout_hash
        assert healthy(channel, "ready")
        assert healthy(channel, "decant.internal.v1.Decode")
        (event,) = prefill(channel, seen.worker, handoff=False)
        assert event.HasField("first")
        assert seen.free_blocks == seen.total_blocks, "the warm-up left nothing behind"
        services.AdminStub(channel).Drain(wire.DrainRequest(worker=seen.worker), timeout=PATIENCE_S)
        assert healthy(channel, "ready"), "the process stays"
    assert worker.terminate() == (0, "")
    assert not await registered(redis)


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["SLOW_LOAD", "SLOW_STEP"])
def test_a_worker_stopped_during_loading_ends_without_finishing_it(run: Run, slow: str) -> None:
    worker = run(**{slow: "100000"})  # far beyond any deadline of the test
    if slow == "SLOW_LOAD":
        worker.until("loading slowly")
    else:
        worker.until("warm-up")
    assert worker.terminate() == (0, "")
    assert worker.lines[-1]["event"] == "ended"


@pytest.mark.slow
def test_a_worker_stopped_during_imports_ends_at_the_first_turn_of_its_event_loop(run: Run) -> None:
    worker = run(GREEDY_LOAD="1")
    worker.until("loading greedily")
    assert worker.terminate() == (0, "")
    events = [line["event"] for line in worker.lines]
    ended = events.index("ended")
    assert events[events.index("shutdown") : ended].count("loading greedily") <= 1
    assert events[ended + 1 :] in ([], ["loading greedily"]), "each line gives the lock away once"


@pytest.mark.slow
def test_a_drain_waits_for_running_requests_and_refuses_new_ones(run: Run) -> None:
    worker = run(FAKE, *SMALL, "--lease-ms", LONG_LEASE_MS)
    with channel_to(worker.ready()) as channel:
        peer = audit(channel).worker
        events = prefill(channel, peer, handoff=True)
        assert next(events).HasField("first")
        ticket = next(events).ticket
        worker.process.terminate()
        worker.until("readiness", state="draining")
        (late,) = prefill(channel, peer, handoff=False)
        assert late.refused.failure.cause == wire.CAUSE_DRAINING
        assert not healthy(channel, "ready")
        assert audit(channel).leases, "the drain waits for it"
        release(channel, ticket)
        assert not list(events), "the handoff was the end of the prompt"
    assert worker.ended() == (0, "")


@pytest.mark.slow
def test_sessions_outlive_the_prompts_whose_tickets_they_renew(run: Run) -> None:
    worker = run(FAKE, *SMALL, "--lease-ms", LONG_LEASE_MS)
    with channel_to(worker.ready()) as channel:
        peer, over = audit(channel).worker, dict[str, float]()
        outgoing = queue.SimpleQueue[wire.RouterMessage | None]()
        outgoing.put(wire.RouterMessage(hello=wire.Hello(router=ROUTER, worker=peer)))
        session = services.DecodeStub(channel).Session(iter(outgoing.get, None), timeout=PATIENCE_S)
        assert next(session).HasField("welcome")

        def listen() -> None:
            for _ in session:
                pass
            over["session"] = time.monotonic()

        listening = threading.Thread(target=listen)
        listening.start()
        events = prefill(channel, peer, handoff=True)
        assert next(events).HasField("first")
        ticket = next(events).ticket
        worker.process.terminate()
        worker.until("readiness", state="draining")
        release(channel, ticket)
        assert not list(events), "the handoff was the end of the prompt"
        over["prompt"] = time.monotonic()
        listening.join(PATIENCE_S)
        outgoing.put(None)
        # Two threads see the two ends; ended too early, the session would be seconds ahead.
        assert over["session"] > over["prompt"] - 2
    assert worker.ended() == (0, "")


def test_a_lost_device_ends_the_process_after_its_answers(run: Run) -> None:
    worker = run(CRASH="1")
    with channel_to(worker.ready()) as channel:
        (event,) = prefill(channel, audit(channel).worker, handoff=False)
        assert event.failed.failure.cause == wire.CAUSE_ENGINE
    assert worker.ended() == (1, "")
    assert "DeviceFailed: the device is lost" in worker.until("engine crashed")["reason"]


def test_a_device_that_is_lost_while_the_model_is_loaded_ends_the_process(run: Run) -> None:
    worker = run(LOST="the device is lost: CUDA error 700")
    assert worker.ended() == (1, ""), "no traceback"
    assert worker.until("load or warm-up failed")["reason"] == "the device is lost: CUDA error 700"


@pytest.mark.slow
def test_a_new_incarnation_replaces_the_old_one(run: Run) -> None:
    old = run(FAKE, *SMALL, "--id", "same")
    old.ready()
    new = run(FAKE, *SMALL, "--id", "same")
    new.ready()
    assert old.ended() == (1, "")
    assert new.terminate() == (0, "")


@pytest.mark.slow
def test_a_worker_outlives_its_redis(run: Run, redis: PrivateRedis) -> None:
    worker = run()
    with channel_to(worker.ready()) as channel:
        redis.stop()
        worker.until("the directory is unavailable; this worker keeps serving")
        (event,) = prefill(channel, audit(channel).worker, handoff=False)
        assert event.HasField("first")
        assert healthy(channel, "ready")
    assert worker.terminate() == (0, "")


def metrics_at(port: int) -> dict[str, str]:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as http:
        http.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        text = b"".join(iter(lambda: http.recv(65536), b"")).decode()
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("decant_"))


def test_metrics_are_served_on_the_admin_port(run: Run) -> None:
    with reserved_port() as port, channel_to(run(FAKE, *SMALL, "--admin-port", str(port)).ready()) as channel:
        list(prefill(channel, audit(channel).worker, handoff=False))
        ends = time.monotonic() + PATIENCE_S
        values = metrics_at(port)
        while float(values["decant_requests_waiting"]) and time.monotonic() < ends:  # as of the last step
            values = metrics_at(port)
    assert float(values["decant_generation_tokens_total"]) == 1
    assert float(values['decant_prompt_tokens_total{source="local_compute"}']) == 40
    assert float(values["decant_requests_waiting"]) == 0
    assert 'decant_handoff_failures_total{cause="peer_lost"}' in values


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-running", "600", "--token-budget", "500"), "--max-running: at most the token budget 500, got 600"),
        (
            ("--kv-bytes", "65536", "--context-length", "9000"),
            "--context-length: at most the 8192 tokens that the KV memory holds",
        ),
        (
            ("--host", "0.0.0.0", "--allow-unauthenticated-peers"),
            "--advertise: needed where host is every address",
        ),
        (("--host", "0.0.0.0"), "--host: a loopback address unless callers authenticate (set --tls-certificate"),
        (("--advertise", "here"), "--advertise: host:port, got here"),
        (("--redis-url", "http://x"), "--redis-url: begins with one of"),
        (("--redis-url", "redis://h:port"), "--redis-url: host:port with a port from 0 to 65535, got another port"),
        (("--model", "/nowhere/at all"), "--model: /nowhere/at all: no folder"),
        (("--handoff", "nixl"), "--handoff: grpc unless --allow-unauthenticated-peers is set"),
        (("--adapters", "pirate=/nowhere"), "--adapters: adapter pirate is not served: /nowhere has no file"),
        (("--adapters", "pirate"), "--adapters: NAME=FOLDER, a name of up to 128"),
        (("--threads", "0"), "--threads"),
        (("--step-ms", "0"), "--step-ms"),
        (("--token-budget", "0"), "--token-budget"),
        (("--block-sise=16",), "did you mean --block-size?"),
    ],
)
def test_invalid_settings_are_refused_in_one_line(run: Run, arguments: Sequence[str], words: str) -> None:
    whole = "--step-ms" in arguments  # how an interpreter ends is the same for all
    status, errors = run(FAKE, *arguments, whole=whole).ended()
    assert (status, errors.count("\n")) == (2, 1), errors
    assert words in errors


def test_a_redis_that_denies_access_is_refused(run: Run, redis: PrivateRedis) -> None:
    url = redis.url.replace("unix://", "unix://:no-such-password@")
    status, errors = run(FAKE, *SMALL, "--redis-url", url).ended()
    assert (status, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("decode_worker: --redis-url: ")
    assert "no-such-password" not in errors


# -- with a real model ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "role"), [("decant.prefill_worker", wire.ROLE_PREFILL), ("decant.decode_worker", wire.ROLE_DECODE)]
)
async def test_a_worker_serves_the_tiny_model(run: Run, redis: PrivateRedis, module: str, role: wire.Role) -> None:
    worker = run((module,), "--kv-bytes", str(8 << 20), whole=role == wire.ROLE_PREFILL)  # both roles end alike
    with channel_to(worker.ready()) as channel:
        seen = audit(channel)
        assert (seen.role, seen.total_blocks * seen.block_bytes <= 8 << 20) == (role, True)
        (registration,) = await registered(redis)
        assert registration.role == role
        (event,) = prefill(channel, seen.worker, handoff=False)
        assert event.first.tokens[0].HasField("finished")
    loaded, measured = worker.until("loaded"), worker.until("step costs measured")
    assert loaded["layers"] == json.loads((models.path() / "config.json").read_text())["num_hidden_layers"]
    assert loaded["layers_in_one_call"] in (0, loaded["layers"]), "none where kernels or linear layers are not ours"
    assert any(measured[cost] > 0 for cost in ("step_ms", "token_ms", "pair_us"))
    assert 1 <= measured["threads"] <= len(os.sched_getaffinity(0))
    assert measured["token_budget"] >= 256, "a token for each sequence of a batch"
    assert worker.terminate() == (0, "")


@pytest.mark.slow
def test_an_idle_worker_uses_almost_no_cpu(run: Run) -> None:
    worker = run(("decant.decode_worker",), "--kv-bytes", str(8 << 20))
    worker.ready()
    before, began = cpu_seconds(worker.process.pid), time.monotonic()
    time.sleep(10)
    share = (cpu_seconds(worker.process.pid) - before) / (time.monotonic() - began)
    assert share < 0.02
    assert worker.terminate() == (0, "")


def cpu_seconds(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_an_unusable_model_is_refused_in_one_line(run: Run, tmp_path: Any) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "no_such_model", "architectures": ["NoSuchModel"]}')
    status, errors = run(("decant.decode_worker",), "--model", str(folder)).ended()
    assert (status, errors.count("\n")) == (2, 1), errors
    assert errors.startswith("decode_worker: --model: ")
