from __future__ import annotations

from collections.abc import Iterator

import pytest

from decant.state.private_redis import PrivateRedis
from tests.decant.fake_workers import FakeAdmin, register, run, serving_admin


@pytest.fixture
def redis() -> Iterator[str]:
    with PrivateRedis() as redis:
        yield redis.url


@pytest.fixture
def workers(redis: str) -> Iterator[FakeAdmin]:
    with serving_admin() as (servicer, address):
        for id in ("decode-1", "prefill-1"):
            register(redis, address, id)
        yield servicer


def test_an_adapter_is_added_to_all_workers_and_removed_from_some(redis: str, workers: FakeAdmin) -> None:
    done = run("add-adapter", "pirate=/srv/pirate", "--redis-url", redis)
    assert (done.exit_code, workers.calls) == (
        0,
        ["add pirate of /srv/pirate decode-1", "add pirate of /srv/pirate prefill-1"],
    )
    assert done.stdout.splitlines()[0] == "decode-1 has pirate now, of rank 8 in revision abc"
    workers.calls.clear()
    done = run("remove-adapter", "pirate", "--worker", "prefill-1", "--redis-url", redis)
    assert (done.exit_code, workers.calls) == (0, ["remove pirate prefill-1"])
    assert done.stdout == "prefill-1 has pirate no more; it was revision abc\n"


def test_a_worker_that_refuses_is_named_and_the_others_have_it(redis: str, workers: FakeAdmin) -> None:
    workers.refusing = {"decode-1"}
    done = run("add-adapter", "pirate=/srv/pirate", "--redis-url", redis)
    assert (done.exit_code, workers.calls) == (1, ["add pirate of /srv/pirate prefill-1"])
    refusal, summary = done.stderr.splitlines()
    assert refusal.startswith("decode-1: ")
    assert refusal.endswith("folder: an adapter that is served: none is there")
    assert summary == "decant: 1 of 2 workers did not do it"


@pytest.mark.parametrize("entry", ["pirate", "=/srv/pirate", "pirate="])
def test_an_entry_without_name_or_folder_is_refused(entry: str, redis: str) -> None:
    done = run("add-adapter", entry, "--redis-url", redis)
    assert (done.exit_code, done.stderr) == (2, f"decant: ADAPTER: NAME=FOLDER, got {entry}\n")


def test_without_workers_nothing_is_done(redis: str) -> None:
    done = run("remove-adapter", "pirate", "--redis-url", redis)
    assert (done.exit_code, done.stderr) == (1, "decant: no worker is registered\n")
