from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import NoReturn

from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.errors import CommandFailed
from decant.command.up import exec_child

_LAST_LINES = 20
_END_SECONDS = 120.0
_WAIT_SECONDS = 0.2  # of one wait: a signal that comes just before it does not end it
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@contextmanager
def temporary_deployment(*arguments: str, variables: Mapping[str, str] = _NO_VARIABLES) -> Iterator[Deployment]:
    """Run a deployment for the ``with``, in the main thread only: SIGTERM ends the deployment and this process. The
    deployment is killed if this process ends before it. Raises CommandFailed if the deployment does not start.
    """
    child = (sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), "", "0")
    up = ("up", "--port", "0", "--log-format", "json")
    command = [*child, sys.executable, "-P", "-m", "decant.command", *up, *arguments]
    started: list[subprocess.Popen[str]] = []
    is_asked = False

    def end(*_: object) -> None:
        nonlocal is_asked
        is_asked = True
        if started:
            _end_process(started)

    before = signal.signal(signal.SIGTERM, end)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **variables},
            process_group=0,  # Ctrl-C is for this process: `up` would take it and SIGTERM for two, and drain nothing
        )
        started.append(process)
        if is_asked:  # while the process was being started
            _end_process(started)
        _await_ready(process)
        yield next(one for one in deployments.running() if one.pid == process.pid)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _stop(started)
        finally:
            signal.signal(signal.SIGTERM, before)


def _end_process(started: Sequence[subprocess.Popen[str]]) -> NoReturn:
    """End this process without an exception: gRPC crashes an interpreter that an exception ends with open calls."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _stop(started)
    finally:
        os._exit(128 + signal.SIGTERM)


def _stop(started: Sequence[subprocess.Popen[str]]) -> None:
    for process in started:
        process.terminate()
        try:
            process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # its processes and Redis end with it
            process.wait()


def _await_ready(process: subprocess.Popen[str]) -> None:
    lines: list[str] = []
    is_known = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if _is_ready(line):
                break
        is_known.set()
        deque(process.stdout, 0)  # else its processes would block in a log call when the pipe is full

    threading.Thread(target=read, daemon=True).start()
    while not is_known.wait(_WAIT_SECONDS):
        pass
    if not lines or not _is_ready(lines[-1]):
        raise CommandFailed("the deployment did not come up:\n" + "".join(lines[-_LAST_LINES:]))


def _is_ready(line: str) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("process") == "up" and fields.get("event") == "ready"
