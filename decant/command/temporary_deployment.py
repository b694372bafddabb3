"""A deployment for the duration of a command."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from decant.command import deployments
from decant.command.deployments import Deployment
from decant.command.errors import CommandFailed

_LAST_LINES = 20
_END_SECONDS = 120.0


@contextmanager
def temporary_deployment(*arguments: str) -> Iterator[Deployment]:
    """A `decant up` until the end of the ``with``. Raises CommandFailed if its start fails."""
    up = ("up", "--port", "0", "--log-format", "json")
    command = [sys.executable, "-P", "-m", "decant.command", *up, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
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
        yield next(one for one in deployments.running() if one.pid == process.pid)
    finally:
        process.terminate()
        process.wait(timeout=_END_SECONDS)


def _is_ready(line: str) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("process") == "up" and fields.get("event") == "ready"
