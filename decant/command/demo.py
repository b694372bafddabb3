"""`decant demo`: a deployment with the small model, one request, status and audit, and its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from decant.command import audit, deployments, generate, status
from decant.command.deployments import Deployment
from decant.command.errors import CommandFailed

PROMPT = 'def is_empty(self):\n    """Return True if the queue is empty."""\n'
SEED = 2
"""Gives the same whole function with every build of the kernels."""
_LAST_LINES = 20
_END_SECONDS = 120.0


def run() -> None:
    """Raises CommandFailed if the start or the audit fails."""
    print("decant up --port 0      (a private Redis, a prefill worker, a decode worker, a router)", flush=True)
    with _deployment() as running:
        print(f"ready on {running.addresses[0]}\n\ndecant generate --temperature 0.7 --seed {SEED} --max-tokens 60\n")
        print(PROMPT, end="", flush=True)
        args = generate.GenerateArgs(running.addresses[0], timeout=_END_SECONDS)
        line = generate.run(args, PROMPT, {"temperature": 0.7, "seed": SEED, "max_tokens": 60})
        print(f"\n{line}")
        print("\ndecant status", flush=True)
        status.run(running.redis_url, as_json=False)
        print("\ndecant audit", flush=True)
        adds_up = audit.run(running.redis_url, running.peer_tls, as_json=False)
    if not adds_up:
        raise CommandFailed("the audit found blocks that nobody accounts for")
    print("\nended, nothing left behind")


@contextmanager
def _deployment() -> Iterator[Deployment]:
    """A new `decant up`, until the end of the ``with``."""
    command = [sys.executable, "-P", "-m", "decant.command", "up", "--port", "0", "--log-format", "json"]
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
        yield next(one for one in deployments.running() if one.pid == process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=_END_SECONDS)


def _is_ready(line: str) -> bool:
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.get("process") == "up" and fields.get("event") == "ready"
