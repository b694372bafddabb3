"""Check of guides before a request is admitted: each is compiled once, in a confined child (`guide_process.py`)."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide
from decant.engine.guides.limits import PARSER_LIMITS
from decant.router.text.text_work import TextWork
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument

START_SECONDS = 120.0
"""Longest start of the process, which reads the tokenizer."""
REPLY_SECONDS = 20.0
"""Longest wait for a reply, which takes a fraction of it in CPU time."""
MAX_KNOWN = 1024
NO_DEADLINE = Deadline()
TOO_MUCH = "a grammar that compiles in 0.75 s of CPU time and 512 MiB"

_PROGRAM = Path(__file__).with_name("guide_process.py")


class GuideCheck:
    """Check of guides for one model's tokenizer. The process starts with the first guide."""

    def __init__(self, tokenizer: Path, vocabulary: int, eos: Sequence[int]) -> None:
        self._setup = {"tokenizer": str(tokenizer), "vocabulary": vocabulary, "eos": list(eos), "limits": PARSER_LIMITS}
        self._work = TextWork(max_concurrent=1)
        self._known: OrderedDict[Guide, InvalidRequest | None] = OrderedDict()
        self._process: subprocess.Popen[bytes] | None = None
        self._end_process: Callable[[], Any] = _nothing

    async def check(self, guide: Guide, deadline: Deadline = NO_DEADLINE) -> None:
        """Raise InvalidArgument for a guide that workers can't follow, QueueFull, DeadlineExceeded."""
        if guide not in self._known:
            size = len(guide.text) + sum(map(len, guide.choices))
            self._known[guide] = await self._work.run(size, deadline, self._error, guide)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(guide)
        error = self._known[guide]
        if error is not None:
            raise InvalidArgument(
                error.field, error.limit, error.value, advice=f"{error.field}: {error.limit}, got {error.value}"
            )

    def _error(self, guide: Guide) -> InvalidRequest | None:
        try:
            grammar = guide.matcher_grammar()
        except InvalidRequest as error:
            return error
        if not self._setup["eos"]:
            return InvalidRequest(guide.field, "a model with an end token", "a guide")
        try:
            reason = self._reply({"grammar": grammar})
        except _TokenizerRefused as refusal:
            return InvalidRequest(guide.field, "a model with another tokenizer", str(refusal))
        except OSError:
            self._end_process()
            self._process = reason = None
        if reason is None:
            return InvalidRequest(guide.field, TOO_MUCH, "one that needs more")
        return InvalidRequest(guide.field, "a grammar that compiles", reason) if reason else None

    def _reply(self, request: dict[str, Any]) -> str | None:
        if self._process is None or self._process.poll() is not None:
            self._end_process()
            self._process = _start()
            self._end_process = weakref.finalize(self, _end, self._process)
            if refusal := _exchange(self._process, self._setup, START_SECONDS):
                raise _TokenizerRefused(refusal)
        return _exchange(self._process, request, REPLY_SECONDS)


class _TokenizerRefused(Exception):
    pass


def _nothing() -> None:
    pass


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", str(_PROGRAM)]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, env={})


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            _close(pipe)


def _close(pipe: IO[bytes]) -> None:
    try:
        pipe.close()
    except BrokenPipeError:  # of what was not written
        os.close(pipe.fileno())


def _exchange(process: subprocess.Popen[bytes], request: dict[str, Any], seconds: float) -> str | None:
    """Send a request and return the reply's error; None: the child was ended.

    Raises OSError if the process ends, at last after ``seconds``.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        content = json.dumps(request).encode()
        process.stdin.write(struct.pack(">I", len(content)) + content)
        process.stdin.flush()
        head = process.stdout.read(4)
        body = process.stdout.read(struct.unpack(">I", head)[0]) if len(head) == 4 else b""
    finally:
        timer.cancel()
    if not body:
        raise BrokenPipeError("its process ended")
    error: str | None = json.loads(body)["error"]
    return error
