from __future__ import annotations

from collections.abc import Iterator

import pytest

from decant.state.private_redis import PrivateRedis
from tests.decant.fake_workers import FakeAdmin, register, run, serving_admin


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with PrivateRedis() as redis:
        yield redis.url


@pytest.fixture
def worker(redis: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAdmin]:
    monkeypatch.setattr("decant.command.drain.POLL_S", 0.0)
    with serving_admin() as (servicer, address):
        register(redis, address)
        yield servicer


def test_a_drain_ends_when_the_worker_has_no_runs(redis: str, worker: FakeAdmin) -> None:
    worker.runs_left = 2
    done = run("drain", "decode-1", "--redis-url", redis)
    assert (done.exit_code, worker.calls) == (0, ["drain decode-1"] * 3)
    assert done.stdout == "decode-1 has no runs and takes none; `decant drain --undo decode-1` puts it back\n"


def test_a_drain_that_takes_too_long_says_what_is_left(redis: str, worker: FakeAdmin) -> None:
    worker.runs_left = 1000
    done = run("drain", "decode-1", "--redis-url", redis, "--timeout", "0")
    assert done.exit_code == 1
    assert done.stderr == "decant: decode-1 still has 1000 runs after 0 s; it remains drained\n"


def test_a_drained_worker_can_be_put_back(redis: str, worker: FakeAdmin) -> None:
    done = run("drain", "decode-1", "--undo", "--redis-url", redis)
    assert (done.exit_code, worker.calls) == (0, ["undrain decode-1"])
    assert done.stdout == "decode-1 takes runs again\n"


def test_a_worker_of_a_shared_redis_is_found_by_its_name_if_only_one_has_it(redis: str, worker: FakeAdmin) -> None:
    for id in ("decode-7@host:1", "decode-8@host:1", "decode-8@host:2"):
        register(redis, "127.0.0.1:1", id)
    assert run("drain", "decode-7", "--redis-url", redis).exit_code == 1, "found, but it does not answer"
    done = run("drain", "decode-8", "--redis-url", redis)
    assert done.exit_code == 2
    assert done.stderr == "decant: WORKER: the id of one worker (decode-8@host:1, decode-8@host:2), got decode-8\n"


def test_a_worker_that_is_not_there_is_refused_with_those_that_are(redis: str, worker: FakeAdmin) -> None:
    done = run("drain", "decode-9", "--redis-url", redis)
    assert done.exit_code == 2
    assert done.stderr.startswith("decant: WORKER: the id of a registered worker (decode-1")
    assert done.stderr.endswith("), got decode-9\n")


def test_a_worker_that_does_not_answer_is_one_line(redis: str, worker: FakeAdmin) -> None:
    register(redis, "127.0.0.1:1", "decode-2")
    done = run("drain", "decode-2", "--redis-url", redis)
    assert done.exit_code == 1
    assert done.stderr.startswith("decant: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("role", "message"), [("prefill", "it was one of decode"), ("decode", "as it was before")])
def test_a_worker_moves_to_the_other_pool(redis: str, worker: FakeAdmin, role: str, message: str) -> None:
    done = run("move", "decode-1", "--role", role, "--redis-url", redis)
    assert (done.exit_code, worker.calls) == (0, [f"{role} decode-1"])
    assert done.stdout == f"decode-1 is in the pool of {role} now, {message}\n"


def test_a_pool_that_does_not_exist_is_refused(redis: str, worker: FakeAdmin) -> None:
    assert run("move", "decode-1", "--role", "both", "--redis-url", redis).exit_code == 2
    assert run("move", "decode-1", "--redis-url", redis).exit_code == 2
    assert worker.calls == []
