"""A stand-in for a router or worker: listens, logs the same lines, ends on SIGTERM. `--does` adds behaviour.

Logs the environment variables named in `--variables`. Imports nothing of the project, to start fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path


def say(event: str, **fields: object) -> None:
    line = {"event": event, "level": "info", "time": datetime.now(UTC).isoformat(), **fields}
    print(json.dumps(line), flush=True)


def wait_unless_first(folder: Path) -> None:
    try:
        (folder / "started").touch(exist_ok=False)
    except FileExistsError:
        while not (folder / "restart").exists():
            time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--does", default="")
    parser.add_argument("--variables", nargs="*", default=[])
    parser.add_argument("--routers")
    given = parser.parse_args()
    if given.does == "refuse":
        print("stand-in: --speed: below 3, got 4", file=sys.stderr)
        return 2
    if given.does == "crash":
        return 1
    if given.does == "restart-when-allowed":
        wait_unless_first(Path(os.environ["XDG_RUNTIME_DIR"]))
    tempfile.mkstemp()  # left behind, as libraries do
    # Blocked and waited for: a handler would not wake a wait that it interrupts just before the call.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    with socket.create_server(("127.0.0.1", given.port)) as listener:
        say("credentials", **{name: os.environ[name] for name in given.variables if name in os.environ})
        if given.routers is not None:
            say("routers", addresses=given.routers)
        say("serving", address=f"127.0.0.1:{listener.getsockname()[1]}")
        if given.does == "load":
            say("loading steps", percent=40)
        elif given.does != "never-ready":
            say("readiness", state="ready")
        print("not JSON", flush=True)
        while True:
            signal.sigwait({signal.SIGTERM})
            say("asked to end")
            if given.does != "never-end":
                return int(given.does == "end-badly")


if __name__ == "__main__":
    sys.exit(main())
