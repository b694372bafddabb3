"""Process that compiles grammars in confined children: ``python -I guide_process.py``, used through stdin and stdout.

Compiling a hostile grammar may take any time and memory, or overflow the stack. Here that ends a child alone: by a
signal after ``SECONDS`` of CPU time, or where an allocation beyond MEMORY_BYTES fails. The tokenizer is read once, by
the parent. What passes compiles in any worker, which has more of each. Outside the standard library it imports only
llguidance.

    message       length: u32, big-endian | JSON
    first         {"tokenizer": path of tokenizer.json, "vocabulary": size, "eos": [ids], "limits": LLParserLimits}
                  its reply is {"error": "..."} if the tokenizer can't be followed, else {"error": ""}
    others        {"grammar": text of llguidance}, and the same replies, or {"error": null}: the child was ended
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
import threading
from typing import IO, Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

SECONDS = 0.75
"""Of CPU time for a grammar."""
MAX_SECONDS = 15
"""Of real time, less than the router waits."""
MEMORY_BYTES = 512 << 20
"""Beside what the process has once the tokenizer is loaded."""
MAX_ERROR_BYTES = 4096
"""Less than a pipe holds."""
STACK_BYTES = 4 << 20
WALKS, WALK_TOKENS = 3, 48


class Checker:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._limits = LLParserLimits(**setup["limits"])
        self._tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["vocabulary"], eos_token=setup["eos"])

    def error(self, grammar: str) -> str:
        """Compile a grammar, and follow it along some outputs: a few grammars never give the mask of a later token."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if not matcher.is_error() and not any(matcher.compute_bitmask()) and not matcher.is_error():
            return "no text matches it"
        for seed in range(WALKS):
            if matcher.is_error():
                return matcher.get_error().partition("\n<")[0]
            if reason := _follow(matcher.deep_copy(), random.Random(seed)):
                return reason
        return ""


def _follow(matcher: LLMatcher, draw: random.Random) -> str:
    for _ in range(WALK_TOKENS):
        mask = matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():
            break
        place = draw.choice([index for index, byte in enumerate(mask) if byte])
        matcher.consume_token(8 * place + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1]))
    return matcher.get_error().partition("\n<")[0] if matcher.is_error() else ""


def serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    checker: Checker | None = None
    while len(length := requests.read(4)) == 4:
        request = json.loads(requests.read(struct.unpack(">I", length)[0]))
        error: str | None = ""
        if checker is None:
            try:
                checker = Checker(request)
            except BaseException as failure:  # noqa: BLE001 - the library's panics derive from BaseException
                error = f"{failure}"
        else:
            error = error_in_child(checker, request["grammar"])
        reply = json.dumps({"error": error}).encode()
        replies.write(struct.pack(">I", len(reply)) + reply)
        replies.flush()


def error_in_child(checker: Checker, grammar: str) -> str | None:
    """Check a grammar in a child. None: it ended without an answer."""
    receiving, sending = os.pipe()
    child = os.fork()
    if not child:
        try:
            confine()
            signal.setitimer(signal.ITIMER_PROF, SECONDS)
            signal.alarm(MAX_SECONDS)
            os.write(sending, checker.error(grammar).encode()[:MAX_ERROR_BYTES])
            os._exit(0)
        finally:
            os._exit(1)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    return None if status else answer.decode(errors="replace")


def confine() -> None:
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    thread.start()
    thread.join()
