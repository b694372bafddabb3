from __future__ import annotations

import io
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import psutil
import pytest
from structlog.testing import capture_logs
from typer.testing import CliRunner

from decant.command.app import app
from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.up import exec_child as lifelines
from decant.command.up.child import Child
from decant.command.up.options import UpOptions
from decant.command.up.output import Output
from decant.command.up.peers import OF_PEERS
from decant.command.up.plan import make_plan
from decant.command.up.supervisor import Supervisor
from decant.runtime.backoff import Backoff
from tests.decant.supervisor_harness import PATIENCE_S, Up, nothing_left, plan, stand_ins, up

pytestmark = pytest.mark.slow

PAIR = {"prefill-1": "", "decode-1": ""}
ROUTER = {"router-1": ""}


def port_of(running: Up, name: str, count: int = 1) -> int:
    return int(running.until(name, "serving", count)["address"].rpartition(":")[2])


def test_routers_start_when_the_workers_are_ready_and_end_before_them(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        ready = [line["process"] for line in running.lines if line["event"] == "readiness"]
        first_of_router = next(i for i, line in enumerate(running.lines) if line["process"] == "router-1")
        assert all(
            any(line["process"] == worker and line["event"] == "readiness" for line in running.lines[:first_of_router])
            for worker in PAIR
        )
        assert ready[-1] == "router-1"
        descendants = running.descendants()
        assert running.end() == 0
        ended = [line["process"] for line in running.lines if line["event"] == "asked to end"]
        assert ended[0] == "router-1"
        assert set(ended[1:]) == set(PAIR)
        nothing_left(descendants, tmp_path)


def test_a_gateway_starts_after_the_routers_with_their_addresses_and_ends_before_them(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, {"router-1": "", "router-2": ""}, has_gateway=True)) as running:
        ready = running.until("up", "ready")
        assert running.until("openai", "routers")["addresses"] == ready["address"].replace(", ", ",")
        assert ready["openai_url"] == f"http://127.0.0.1:{port_of(running, 'openai')}/v1"
        assert running.until("openai", "credentials").keys() & OF_PEERS == set(), "it calls no worker"
        started = [line["process"] for line in running.lines if line["event"] == "readiness"]
        assert started[-1] == "openai"
        descendants = running.descendants()
        assert running.end() == 0
        ended = [line["process"] for line in running.lines if line["event"] == "asked to end"]
        assert ended[0] == "openai"
        assert set(ended[1:3]) == {"router-1", "router-2"}
        nothing_left(descendants, tmp_path)


def test_the_processes_of_a_run_share_private_credentials_which_are_gone_afterwards(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        worker, router = (running.until(name, "credentials") for name in ("decode-1", "router-1"))
        peers = {name: worker[f"DECANT_PEER_{name}"] for name in ("CA", "CERTIFICATE", "KEY", "NAME")}
        assert {name: router[f"DECANT_PEER_{name}"] for name in peers} == peers
        served = {name: worker[f"DECANT_TLS_{name}"] for name in ("CLIENT_CA", "CERTIFICATE", "KEY")}
        assert served == {"CLIENT_CA": peers["CA"], "CERTIFICATE": peers["CERTIFICATE"], "KEY": peers["KEY"]}
        assert not [name for name in router if name.startswith("DECANT_TLS")], "those of a router are for its clients"
        key = Path(peers["KEY"])
        assert key.is_relative_to(tmp_path)
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert {stat.S_IMODE(folder.stat().st_mode) for folder in (key.parent, key.parent.parent)} == {0o700}
        assert running.end() == 0
        nothing_left([], tmp_path)


def test_lines_without_json_are_passed_on_with_their_process(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("decode-1", "not JSON")
        running.until("up", "ready")
        assert running.end(signal.SIGINT) == 0


def test_killing_up_ends_all_its_processes(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        descendants = running.descendants()
        assert len(descendants) >= 5  # three stand-ins, Redis, keepers
        assert list(tmp_path.iterdir())
        assert running.end(signal.SIGKILL) == -signal.SIGKILL
        nothing_left(descendants, tmp_path)


def test_a_process_that_refuses_its_settings_ends_all_with_its_own_message(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins({"prefill-1": "", "decode-1": "refuse"}, ROUTER)) as running:
        assert running.ended() == 2
        assert "decode-1: stand-in: --speed: below 3, got 4" in running.stderr()
        assert running.events("router-1") == []
        nothing_left([], tmp_path)


def test_a_process_that_crashes_at_once_ends_all(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins({"prefill-1": "", "decode-1": "crash"}, ROUTER)) as running:
        assert running.ended() == 1
        assert "decode-1: ended with 1 before it was ready" in running.stderr()
        nothing_left([], tmp_path)


def test_a_process_that_is_never_ready_ends_all_in_time(tmp_path: Path) -> None:
    command = stand_ins({"prefill-1": "", "decode-1": "never-ready"}, ROUTER, ready_seconds=2.0)
    with up(tmp_path, command) as running:
        descendants = set[psutil.Process]()
        while running.has_output:  # a busy machine may start none of them in time
            descendants.update(running.descendants())
            time.sleep(0.02)
        assert running.ended() == 1
        assert "decode-1: not ready within 2 s" in running.stderr()
        nothing_left(list(descendants), tmp_path)


def test_up_can_be_ended_while_it_starts(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins({"decode-1": "never-ready"}, ROUTER)) as running:
        running.until("decode-1", "serving")
        descendants = running.descendants()
        assert running.end() == 0
        nothing_left(descendants, tmp_path)


@pytest.mark.parametrize("name", ["decode-1", "router-1"])
def test_a_killed_process_is_restarted_and_reported(tmp_path: Path, name: str) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        before = port_of(running, name)
        running.child(before).kill()
        assert running.until("up", "process ended", name=name)["status"] == -signal.SIGKILL
        running.until(name, "readiness", 2)
        after = port_of(running, name, 2)
        if name == "router-1":
            assert after == before, "its clients know no other port"
        socket.create_connection(("127.0.0.1", after), PATIENCE_S).close()
        descendants = running.descendants()
        assert running.end() == 0
        nothing_left(descendants, tmp_path)


async def test_a_process_that_the_system_cannot_start_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor(plan({}, ROUTER, "redis://"), Output(io.StringIO()))
    child = Mock(spec=Child)
    child.spec, child.address = supervisor._plan.routers[0], None
    start = AsyncMock(side_effect=[BlockingIOError("Resource temporarily unavailable"), OSError("no memory"), child])
    monkeypatch.setattr(supervisor, "_start", start)
    monkeypatch.setattr("decant.command.up.supervisor.RESTART_BACKOFF", Backoff(0.0, 0.0))
    with capture_logs() as lines:
        assert await supervisor._start_again(child) is child
    assert [line["reason"] for line in lines] == ["Resource temporarily unavailable", "no memory"]


def test_a_redis_of_its_own_that_ends_ends_all(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        descendants = running.descendants()
        (redis,) = [one for one in descendants if one.name() == "redis-server"]
        redis.kill()
        assert running.ended() == 1
        assert "Redis: it ended" in running.stderr()
        nothing_left(descendants, tmp_path)


def test_modules_in_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    (spec,) = plan({}, {"router-1": ""}, "redis://").routers
    here = tmp_path / "here"
    (here / "decant" / "router").mkdir(parents=True)
    (here / "decant" / "__init__.py").touch()
    (here / "decant" / "router" / "__init__.py").touch()
    (here / "decant" / "router" / "__main__.py").write_text("print('not ours')")
    command = replace(spec, module="decant.router", arguments=("--help",)).command
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=PATIENCE_S)
    assert "not ours" not in done.stdout
    assert "--queue-limit" in done.stdout


def test_a_second_signal_ends_at_once_and_until_then_commands_say_that_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with up(tmp_path, stand_ins({"decode-1": "never-end"}, ROUTER)) as running:
        running.until("up", "ready")
        descendants = running.descendants()
        running.process.send_signal(signal.SIGTERM)
        running.until("decode-1", "asked to end")
        until_found(lambda one: one.is_ending)
        ending = f"`decant up` (process {running.process.pid}) is ending"
        assert CliRunner().invoke(app, ["status"]).stdout.startswith(ending)
        done = CliRunner().invoke(app, ["generate", "x"])
        assert (done.exit_code, done.stderr) == (1, f"decant: {ending}\n")
        assert running.end() == 1
        nothing_left(descendants, tmp_path)


def test_a_shutdown_that_cut_requests_off_is_reported(tmp_path: Path) -> None:
    with up(tmp_path, stand_ins({"decode-1": "end-badly"}, ROUTER)) as running:
        running.until("up", "ready")
        assert running.end() == 1
        assert running.until("up", "did not end gracefully")["names"] == ["decode-1"]


def test_a_process_that_does_not_end_is_killed_when_its_drain_is_over(tmp_path: Path) -> None:
    command = stand_ins({"decode-1": "never-end"}, ROUTER, drain_seconds=-14.0)  # one second with the margin
    with up(tmp_path, command) as running:
        running.until("up", "ready")
        descendants = running.descendants()
        assert running.end() == 1
        running.until("up", "killed after the drain timeout", name="decode-1")
        nothing_left(descendants, tmp_path)


def test_a_running_deployment_is_found_by_its_user_alone_and_only_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with up(tmp_path, stand_ins(PAIR, ROUTER)) as running:
        running.until("up", "ready")
        (found,) = deployments.running()
        assert found.pid == running.process.pid
        assert found.addresses == (running.until("router-1", "serving")["address"],)
        assert found.redis_url.startswith("unix://")
        assert found.processes.keys() == {*PAIR, *ROUTER}
        assert all(psutil.pid_exists(one.pid) and one.is_ready for one in found.processes.values())
        assert found.has_started
        (path,) = tmp_path.glob("decant-up-*.json")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        text = path.read_text()
        assert running.end() == 0
        path.write_text(text)
        assert deployments.running() == [], "a file whose writer has ended is stale"
        path.unlink()


def until_found(condition: Callable[[Deployment], bool]) -> Deployment:
    ends = time.monotonic() + PATIENCE_S
    while True:
        found = deployments.running()
        if found and condition(found[0]):
            return found[0]
        assert time.monotonic() < ends, found
        time.sleep(0.02)


def test_a_deployment_that_starts_is_found_with_the_progress_of_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with up(tmp_path, stand_ins({"prefill-1": "load", "decode-1": ""}, ROUTER)) as running:
        found = until_found(lambda one: {"loading", "ready"} == {each.state for each in one.processes.values()})
        assert (found.has_started, found.addresses) == (False, ())
        assert found.processes["prefill-1"].describe() == "loading 40 %"
        starting = f"`decant up` (process {running.process.pid}) is starting: prefill-1 (loading 40 %)"
        for command in (["generate", "x", "--wait", "0"], ["audit"], ["audit", "--wait", "0.2"]):
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 1
            assert done.stderr.endswith(f"decant: {starting}; --wait SECONDS waits for it\n")
        done = CliRunner().invoke(app, ["status"])
        assert done.exit_code == 0
        first, _, *rows = done.stdout.splitlines()
        assert first == f"`decant up` (process {running.process.pid}) is starting"
        assert [row.rstrip() for row in rows] == [
            "prefill-1  prefill  loading 40 %",
            "decode-1   decode   not registered",
        ]


def test_a_process_that_is_lost_is_shown_until_it_is_ready_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with up(tmp_path, stand_ins(PAIR | {"decode-1": "restart-when-allowed"}, ROUTER)) as running:
        running.until("up", "ready")
        running.child(port_of(running, "decode-1")).kill()
        lost = until_found(lambda one: one.processes["decode-1"].lost_at is not None).processes["decode-1"]
        assert lost.describe(now=(lost.lost_at or 0) + 3.2).startswith("lost 3 s ago")
        (tmp_path / "restart").touch()
        again = until_found(lambda one: one.processes["decode-1"].is_ready).processes["decode-1"]
        assert again.describe() == "ready"
        assert again.pid != lost.pid or lost.state != "lost"


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def without(name: str) -> list[str]:
    patch = "ctypes.CDLL = lambda *_, **__: object()" if name == "prctl" else f"del os.{name}"
    code = f"import ctypes, os, runpy, sys; {patch}; sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
    return [sys.executable, "-I", "-S", "-c", code, lifelines.__file__]


def test_without_prctl_a_process_ends_with_its_parent() -> None:
    sleeping = [*without("prctl"), "PARENT", "", "0", sys.executable, "-c", "import time; time.sleep(600)"]
    code = f"""
import os, subprocess, time
child = subprocess.Popen([str(os.getpid()) if word == "PARENT" else word for word in {sleeping}])
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            child = psutil.Process(int(parent.stdout.readline()))
            # The command line of a process is empty during exec.
            until(lambda: child.cmdline()[-1:] == sleeping[-1:] and bool(child.children()))
            watchers = child.children()
        finally:
            parent.kill()
    gone, _ = psutil.wait_procs([child, *watchers], timeout=PATIENCE_S)
    assert len(gone) == 2


def test_without_prctl_the_watcher_ends_with_its_process_and_holds_none_of_its_streams() -> None:
    code = "import psutil; print(*[child.pid for child in psutil.Process().children()])"
    command = [*without("prctl"), str(os.getpid()), "", "0", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    until(lambda: not psutil.pid_exists(int(done.stdout)))


def test_without_core_affinity_a_process_starts_on_any_core() -> None:
    command = [*without("sched_setaffinity"), str(os.getpid()), "0", "0", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == "started"


def test_each_process_runs_on_the_cores_that_are_its_own() -> None:
    core = min(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0))"
    exec_child = (sys.executable, "-I", "-S", lifelines.__file__, str(os.getpid()), str(core), "0")
    done = subprocess.run(
        [*exec_child, sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == str({core})


def test_workers_give_way_to_the_router_and_to_redis() -> None:
    plan = make_plan(UpOptions(), "redis://", {})
    assert {spec.niceness for spec in plan.routers} == {0}
    assert all(spec.niceness > 0 for spec in plan.workers)
    code = "import os; print(os.nice(0))"
    command = [sys.executable, "-I", "-S", lifelines.__file__, str(os.getpid()), "", "3", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert int(done.stdout) == min(19, os.nice(0) + 3)
