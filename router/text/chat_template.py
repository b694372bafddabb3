"""Renderer of chat messages with the model's own template, in a confined process (`template_process.py`).

Even in jinja2's sandbox a template may loop or allocate without end. A process that does not reply in RENDER_SECONDS is
killed; the next request starts another.
"""

from __future__ import annotations

import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.router.text.text_work import TextWork
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument

RENDER_SECONDS = 5.0
START_SECONDS = 60.0
"""Longest start of the process, which a busy machine delays; no part of the time for a conversation."""
MAX_RENDERED = 16 * 1024 * 1024
"""Characters."""
NO_DEADLINE = Deadline()

_PROGRAM = Path(__file__).with_name("template_process.py")
_EMPTY = json.dumps({"template": "", "variables": {}, "max_characters": 0, "lengths": [], "time": None}).encode()
_ENVIRONMENT = ("TZ", "LANG", "LC_ALL", "LC_TIME")


class ChatTemplate:
    def __init__(
        self,
        template: str,
        tokens: Mapping[str, str],
        timeout_s: float = RENDER_SECONDS,
        max_characters: int = MAX_RENDERED,
    ) -> None:
        self.timeout_s = timeout_s
        self._max_characters = max_characters
        self._template = template
        self._tokens = dict(tokens)
        self._work = TextWork(max_concurrent=1)
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], Any] = _nothing

    async def render(
        self,
        messages: Sequence[pb.Message],
        *,
        add_generation_prompt: bool,
        deadline: Deadline = NO_DEADLINE,
        unix_time: float | None = None,
    ) -> str:
        """Render messages; ``unix_time`` is what the template takes for now, None: the clock's."""
        texts = [text.encode() for message in messages for text in (message.role, message.content)]
        head = {
            "template": self._template,
            "variables": {
                **self._tokens,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            },
            "max_characters": self._max_characters,
            "lengths": list(map(len, texts)),
            "time": unix_time,
        }
        content = b"".join(texts)
        reply, text = await self._work.run(len(content), deadline, self._render, json.dumps(head).encode(), content)
        match reply:
            case {"refused": refusal}:
                raise InvalidArgument("messages", "a conversation that the model's chat template takes", refusal)
            case {"failed": failure}:
                raise InvalidArgument("messages", "a conversation that the model's chat template can render", failure)
        return text

    def _render(self, head: bytes, texts: bytes) -> tuple[Mapping[str, Any], str]:
        limit_s = START_SECONDS
        try:
            if self._process is None or self._process.poll() is not None:  # it may end while it is idle
                self._end_process()
                self._process = _start()
                self._end_process = weakref.finalize(self, _end, self._process)
                _exchange(self._process, _EMPTY, b"", time.monotonic() + limit_s)
            limit_s = self.timeout_s
            reply, text = _exchange(self._process, head, texts, time.monotonic() + limit_s)
        except OSError as error:
            self._process = None
            self._end_process()
            has_timed_out = isinstance(error, TimeoutError)
            return {"failed": f"no answer in {limit_s:g} seconds" if has_timed_out else str(error)}, ""
        return json.loads(reply), text.decode()


def _nothing() -> None:
    pass


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", str(_PROGRAM)]
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
