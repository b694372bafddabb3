from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from decant.command import deployments
from decant.command.deployments import Deployment
from decant.command.errors import CommandFailed

_LAST_LINES = 20
_END_SECONDS = 120.0
_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})


@contextmanager
def temporary_deployment(*arguments: str, variables: Mapping[str, str] = _NO_VARIABLES) -> Iterator[Deployment]:
    """Also ends on SIGTERM. Raises CommandFailed if it does not start. Main thread only."""
    with _exit_on_sigterm(), _started(arguments, variables) as process:
        yield next(one for one in deployments.running() if one.pid == process.pid)


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block, then the process: gRPC may crash an interpreter that ends with open calls."""
    status = 128 + signal.SIGTERM
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(status))
    try:
        yield
    except SystemExit as end:
        if end.code == status:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _started(arguments: tuple[str, ...], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    up = ("up", "--port", "0", "--log-format", "json")
    command = [sys.executable, "-P", "-m", "decant.command", *up, *arguments]
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if _is_ready(line):
                break
        else:
            raise CommandFailed("the deployment did not come up:\n" + "".join(lines[-_LAST_LINES:]))
        # Else its processes would block in a log call when the pipe is full.
        threading.Thread(target=deque, args=(process.stdout, 0), daemon=True).start()
        yield process
    finally:
        process.terminate()
        process.wait(timeout=_END_SECONDS)


def _is_ready(line: str) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("process") == "up" and fields.get("event") == "ready"
