from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import RouterRegistration, UnusedWorker, WorkerRegistration
from decant.runtime.connections.peer import new_peer
from decant.state.private_redis import PrivateRedis
from tests.decant.fake_workers import FakeAdmin, register, run, serving_admin
from tests.state.factories import make_store


@pytest.fixture
def worker() -> Iterator[tuple[FakeAdmin, str]]:
    with serving_admin() as served:
        yield served


@pytest.fixture
def redis() -> Iterator[str]:
    with PrivateRedis() as redis:
        yield redis.url


def test_status_shows_processes_and_their_load(redis: str) -> None:
    register(redis, "h:2")
    done = run("status", "--redis-url", redis)
    assert done.exit_code == 0
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("decode-1")]
    assert line.split() == ["decode-1", "decode", "ready", "2", "0", "55", "4/10", "m", "h:2"]
    assert any(line.split() == ["router-1", "router", "ready", "3", "1", "h:1"] for line in done.stdout.splitlines())
    report = json.loads(run("status", "--redis-url", redis, "--json").stdout)
    assert [one["peer"]["id"] for one in report["routers"]] == ["router-1"]
    assert report["workers"][0]["load"]["running"] == 2
    assert [report["workers"][0]["state"], report["routers"][0]["state"]] == ["ready", "ready"]
    assert report["routers"][0]["load"]["waiting"] == 1


def test_status_says_which_ready_worker_a_router_does_not_use(redis: str) -> None:
    async def write() -> None:
        async with make_store(redis, registration_s=600.0) as store:
            peers = {id: new_peer(id) for id in ("decode-1", "decode-2")}
            for id, peer in peers.items():
                registration = WorkerRegistration(peer=peer, address="h:2", role=wire.ROLE_DECODE, model="m")
                await store.workers.register(registration, wire.Load(draining=id == "decode-2"))
            unused = [
                UnusedWorker(id=id, incarnation=peer.incarnation, reason="another tokenizer")
                for id, peer in peers.items()
            ]
            unused.append(UnusedWorker(id="decode-1", incarnation=1, reason="its incarnation is gone"))
            for router in ("router-1", "router-2"):
                one = RouterRegistration(peer=new_peer(router), address="h:1", unused_workers=unused)
                await store.routers.register(one)

    asyncio.run(write())
    shown = run("status", "--redis-url", redis).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("decode-1")]
    assert "ready, not used by router-1, router-2: another tokenizer" in line
    (draining,) = [line for line in shown.splitlines() if line.startswith("decode-2")]
    assert draining.split()[2] == "draining"
    assert "its incarnation is gone" not in shown
    workers = json.loads(run("status", "--redis-url", redis, "--json").stdout)["workers"]
    assert workers[0]["unused_by"] == {"router-1": "another tokenizer", "router-2": "another tokenizer"}


def test_status_is_shown_again_every_second_until_it_is_interrupted(
    redis: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(redis, "h:2")
    pauses = iter([None, None])

    def interrupted(_: float) -> None:
        if next(pauses, KeyboardInterrupt) is KeyboardInterrupt:
            raise KeyboardInterrupt

    monkeypatch.setattr("decant.command.status.time.sleep", interrupted)
    done = run("status", "--redis-url", redis, "--watch", "--json")
    assert done.exit_code == 130
    assert [json.loads(line)["workers"][0]["state"] for line in done.stdout.splitlines()] == ["ready"] * 3


def test_a_consistent_audit_succeeds(redis: str, worker: tuple[FakeAdmin, str]) -> None:
    register(redis, worker[1])
    done = run("audit", "--redis-url", redis)
    assert done.exit_code == 0
    assert "adds up" in done.stdout
    report = json.loads(run("audit", "--redis-url", redis, "--json").stdout)
    assert report["workers"][0]["faults"] == []
    assert report["workers"][0]["leased_blocks"] == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (wire.AuditResponse(total_blocks=10, free_blocks=9), "9 accounted for"),
        (wire.AuditResponse(total_blocks=1, free_blocks=1, violations=["block 3 has no owner"]), "block 3"),
    ],
)
def test_an_inconsistent_audit_exits_with_1(
    redis: str, worker: tuple[FakeAdmin, str], answer: wire.AuditResponse, message: str
) -> None:
    worker[0].answer = answer
    register(redis, worker[1])
    done = run("audit", "--redis-url", redis)
    assert done.exit_code == 1
    assert message in done.stdout


def test_a_worker_that_does_not_answer_fails_the_audit(redis: str, worker: tuple[FakeAdmin, str]) -> None:
    register(redis, worker[1])
    register(redis, "127.0.0.1:1", "decode-2")
    done = run("audit", "--redis-url", redis, "--json")
    assert done.exit_code == 1
    first, second = json.loads(done.stdout)["workers"]
    assert (first["faults"], bool(second["faults"])) == ([], True)


def test_an_audit_without_workers_fails(redis: str) -> None:
    done = run("audit", "--redis-url", redis)
    assert (done.stderr, done.exit_code) == ("decant: no worker is registered: there is nothing to audit\n", 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ca", "/nowhere"), "--ca: a file of PEM certificates (No such file or directory), got /nowhere"),
        (("--server-name", "worker"), "--certificate and --server-name need --ca"),
    ],
)
def test_unusable_tls_options_of_an_audit_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = run("audit", "--redis-url", "redis://127.0.0.1:1", *arguments)
    assert done.exit_code == 2
    assert done.stderr == f"decant: {message}\n"


def test_a_redis_that_is_not_there_is_one_line() -> None:
    for command in ("status", "audit"):
        for url in ("redis://127.0.0.1:1", "nonsense"):
            done = run(command, "--redis-url", url)
            assert done.exit_code == 1
            assert done.stderr.startswith("decant: Redis: ")
            assert done.stderr.count("\n") == 1
