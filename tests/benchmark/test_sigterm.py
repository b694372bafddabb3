from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from decant.command.deployment import deployments
from tests.e2e.fork_server import Forked

ONE_WORKER = ("--prefill", "0", "--decode", "1")  # it imports torch for seconds
BENCH = ("bench", "--up", *ONE_WORKER, "--requests", "100000", "--concurrency", "1", "--output-tokens", "64")
DEADLINE_S = 240.0


def until(find: Callable[[], list[psutil.Process]], bench: Forked) -> list[psutil.Process]:
    ends = time.monotonic() + DEADLINE_S
    while time.monotonic() < ends:
        assert bench.poll() is None, "the command ended by itself"
        if found := find():
            return found
        time.sleep(0.2)  # each look goes through all processes of the machine
    raise AssertionError("the deployment did not get so far")


@pytest.mark.slow
@pytest.mark.parametrize("state", ["starting", "measuring"])
def test_sigterm_leaves_no_process_and_no_record(state: str) -> None:
    with open(os.devnull, "w") as nowhere:
        bench = Forked("decant.command", BENCH, nowhere.fileno(), nowhere.fileno())

    def processes() -> list[psutil.Process]:
        children = psutil.Process(bench.pid).children(recursive=True)
        records = [one for one in deployments.running() if one.pid in {child.pid for child in children}]
        if not records or (state == "measuring" and not records[0].has_started):
            return []
        return children

    try:
        left = until(processes, bench)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(DEADLINE_S) == 128 + signal.SIGTERM
    finally:
        bench.terminate()
        bench.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(left, timeout=DEADLINE_S)
    assert not alive
    assert not [one for one in deployments.running() if one.pid in {process.pid for process in left}]
