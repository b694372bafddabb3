"""A confined process that renders one chat template (`template_process/`), and the exchange of messages with it."""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RENDER_SECONDS = 5.0
START_SECONDS = 60.0
"""Longest start of the process, which a busy machine delays; no part of the time for a conversation."""

_PROGRAM = """
import sys, types
for name in ("decant", "decant.router", "decant.router.text"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].__path__ = sys.argv[1:]
from decant.router.text.template_process.process import main
main()
"""
"""The process loads `template_process/` alone: what our packages import takes time and memory."""
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME")

Reply = Mapping[str, Any]


class TemplateChannel:
    """Owner of the process, which the first request starts; one that fails is replaced. Used from one thread at a time.

    ``setup`` is the first message of each process.
    """

    def __init__(self, setup: Mapping[str, Any], timeout_s: float = RENDER_SECONDS) -> None:
        self.timeout_s = timeout_s
        self._setup = json.dumps(setup).encode()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], Any] = _nothing

    def start(self) -> Reply:
        """The process's reply to ``setup``, or ``failed`` if it did not answer."""
        self._end_process()
        self._process = _start()
        self._end_process = weakref.finalize(self, _end, self._process)
        return self._exchange(self._process, self._setup, b"", START_SECONDS)[0]

    def request(self, head: bytes, texts: bytes) -> tuple[Reply, str]:
        """Reply and text, or the reply ``failed`` of a process that did not answer."""
        if self._process is None or self._process.poll() is not None:  # it may end while it is idle
            reply = self.start()
            if self._process is None:
                return reply, ""
        return self._exchange(self._process, head, texts, self.timeout_s)

    def _exchange(
        self, process: subprocess.Popen[bytes], head: bytes, texts: bytes, limit_s: float
    ) -> tuple[Reply, str]:
        try:
            reply, text = _exchange(process, head, texts, time.monotonic() + limit_s)
        except OSError as error:
            self._process = None
            self._end_process()
            has_timed_out = isinstance(error, TimeoutError)
            return {"failed": f"no answer in {limit_s:g} seconds" if has_timed_out else str(error)}, ""
        return json.loads(reply), text.decode()


def _nothing() -> None:
    pass


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-c", _PROGRAM, str(Path(__file__).parent)]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=environment
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _exchange(process: subprocess.Popen[bytes], head: bytes, texts: bytes, ends_at: float) -> tuple[bytes, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    for part in (struct.pack(">II", len(head), len(texts)), head, texts):
        left = memoryview(part)
        while left:
            _wait_ready(process.stdin.fileno(), select.POLLOUT, ends_at)
            left = left[os.write(process.stdin.fileno(), left) :]
    lengths = struct.unpack(">II", _read(process.stdout.fileno(), 8, ends_at))
    reply, text = (_read(process.stdout.fileno(), length, ends_at) for length in lengths)
    return reply, text


def _read(pipe: int, count: int, ends_at: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _wait_ready(pipe, select.POLLIN, ends_at)
        part = os.read(pipe, count - len(data))
        if not part:
            raise BrokenPipeError("its process ended")
        data += part
    return bytes(data)


def _wait_ready(pipe: int, event: int, ends_at: float) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, ends_at - time.monotonic()) * 1000):
        raise TimeoutError
