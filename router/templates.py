"""Chat messages become a prompt's text by the model's own template, in a process that can do nothing else.

messages --> ChatTemplate --> rendering.py, one process per model, started when first needed --> text
                '-- no answer in RENDER_SECONDS: it is killed; the next conversation gets another
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from protos import inference_pb2 as pb
from runtime.errors import InvalidArgument

RENDER_SECONDS = 5.0
MAX_RENDERED = 16 * 1024 * 1024
"""Characters."""

_PROGRAM = Path(__file__).with_name("rendering.py")
_KEPT = ("TZ", "LANG", "LC_ALL", "LC_TIME")
"""What its process learns of the environment."""


class ChatTemplate:
    """The template of one model; ``tokens`` are its special ones by name, as "bos_token"."""

    def __init__(self, template: str, tokens: Mapping[str, str]) -> None:
        self._template = template
        self._tokens = dict(tokens)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._process: subprocess.Popen[bytes] | None = None
        self._ending: Callable[[], Any] = _nothing

    async def render(self, messages: Sequence[pb.Message], *, add_generation_prompt: bool) -> str:
        """Raises InvalidArgument for messages that the template refuses or fails at."""
        variables = {
            **self._tokens,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        question = {"template": self._template, "variables": variables, "most": MAX_RENDERED}
        loop = asyncio.get_running_loop()
        said = await loop.run_in_executor(self._thread, self._ask, json.dumps(question).encode())
        match said:
            case {"text": str(text)}:
                return text
            case {"refused": refusal}:
                raise InvalidArgument("messages", "a conversation that the model's chat template takes", refusal)
            case _:
                limit = "a conversation that the model's chat template can render"
                raise InvalidArgument("messages", limit, said["failed"])

    def _ask(self, question: bytes) -> Mapping[str, Any]:
        """On its own thread, one after the other."""
        if self._process is None:
            self._process = _start()
            self._ending = weakref.finalize(self, _end, self._process)
        try:
            said: Mapping[str, Any] = json.loads(_exchange(self._process, question, time.monotonic() + RENDER_SECONDS))
        except OSError as error:
            self._process = None
            self._ending()
            return {"failed": str(error)}
        return said


def _nothing() -> None:
    """There is no process to end."""


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", str(_PROGRAM)]
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env=kept
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


def _exchange(process: subprocess.Popen[bytes], question: bytes, ends_at: float) -> bytes:
    """Raises OSError: no answer in time, or the process has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    left = memoryview(struct.pack(">I", len(question)) + question)
    while left:
        _ready(process.stdin.fileno(), select.POLLOUT, ends_at)
        left = left[os.write(process.stdin.fileno(), left) :]
    (length,) = struct.unpack(">I", _read(process.stdout.fileno(), 4, ends_at))
    return _read(process.stdout.fileno(), length, ends_at)


def _read(pipe: int, count: int, ends_at: float) -> bytes:
    data = bytearray()
    while len(data) < count:
        _ready(pipe, select.POLLIN, ends_at)
        part = os.read(pipe, count - len(data))
        if not part:
            raise BrokenPipeError("its process ended")
        data += part
    return bytes(data)


def _ready(pipe: int, event: int, ends_at: float) -> None:
    """Waits for it. Raises TimeoutError."""
    poll = select.poll()
    poll.register(pipe, event)
    if not poll.poll(max(0.0, ends_at - time.monotonic()) * 1000):
        raise TimeoutError(f"no answer in {RENDER_SECONDS:g} seconds")
