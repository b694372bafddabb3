from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment, DeploymentRecord
from tests.decant.scripted import PATIENCE_S


def test_a_record_that_is_replaced_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    is_locked = deployments._is_locked
    with DeploymentRecord() as record:
        record.write(Deployment(os.getpid(), ("h:1",), "unix:///r"))
        newer = iter([Deployment(os.getpid(), ("h:2",), "unix:///r")])

        def replaced(descriptor: int) -> bool:
            for one in newer:
                record.write(one)
            return is_locked(descriptor)

        monkeypatch.setattr(deployments, "_is_locked", replaced)
        (found,) = deployments.running()
    assert found.addresses == ("h:2",)


PROGRAM = """
import os, signal, subprocess, sys, threading, time
from decant.command.deployment.temporary_deployment import temporary_deployment

class Started(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__([sys.executable, "-c", "import time; time.sleep(120)"], **options)
        print(self.pid, flush=True)
        {signal}

def later():
    time.sleep(0.1)  # the main thread waits
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

subprocess.Popen = Started
with temporary_deployment():
    pass
"""


@pytest.mark.parametrize(
    "sent",
    ["os.kill(os.getpid(), signal.SIGTERM)", "threading.Thread(target=later, daemon=True).start()"],
    ids=["before its id is known", "just before a wait"],
)
def test_a_signal_at_any_instant_of_a_start_ends_the_deployment(sent: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(signal=sent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = int(process.stdout.readline())
            assert process.wait(PATIENCE_S) == 128 + 15
        finally:
            process.kill()
    assert not psutil.pid_exists(started)


UP = """
import os, signal, sys, time

def note(number, _):
    print(signal.Signals(number).name, file=sys.stderr, flush=True)
    if sys.argv[1] == "drained" and number == signal.SIGTERM:
        os._exit(0)

signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
print("started", file=sys.stderr, flush=True)
time.sleep(120)
print("left alone", file=sys.stderr)
"""

INTERRUPTED = f"""
import signal, subprocess, sys
from decant.command.deployment.temporary_deployment import temporary_deployment
from decant.command.errors import one_line_errors

class Started(subprocess.Popen):
    def __init__(self, command, **options):
        stand_in = [*command[: command.index("-P")], "-c", {UP!r}, *sys.argv[1:]]
        super().__init__(stand_in, **options | {{"stderr": None}})

signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in background jobs
subprocess.Popen = Started
with one_line_errors(), temporary_deployment():
    pass
"""


@pytest.mark.parametrize(("drain", "presses"), [("drained", 1), ("endless", 2)])
def test_ctrl_c_drains_the_deployment_and_a_second_one_kills_it(drain: str, presses: int) -> None:
    command = [sys.executable, "-c", INTERRUPTED, drain]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == "started\n"
            os.killpg(process.pid, signal.SIGINT)
            assert process.stderr.readline() == "SIGTERM\n"
            if presses == 2:
                os.killpg(process.pid, signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
            assert process.stderr.read() == "", "it has ended, without another signal or an error"
        finally:
            process.kill()
