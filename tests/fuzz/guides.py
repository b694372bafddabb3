"""Check and follow random and hostile guides: python -m tests.fuzz.guides [--guides N] [--seed N].

A guide is refused by its field, or its masks are bounded in time until an output ends. Anything else ends the run. A
check may take 0.75 s of CPU time: its real time, which is printed, shows how busy the machine is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import time
from threading import Thread
from typing import NamedTuple

from decant import models
from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar
from decant.engine.guides.guide import Guide
from decant.router.text.guide_check import GuideCheck
from decant.runtime.errors import InvalidArgument
from tests.engine.guides.hostile import guide
from tests.engine.guides.walk import END, VOCABULARY, allowed, compiler

OUTPUTS, MAX_TOKENS = 3, 60
MAX_SECONDS = 120.0
"""For all outputs of a guide, which take a second of CPU time at most."""
MAX_MASK_MS, REPEATED_MS, REPETITIONS = 10.0, 1.0, 5
MAX_GROWTH_MB = 600
"""Of this process, which keeps the last 128 grammars."""


class Outcome(NamedTuple):
    """What became of a guide: whether it was admitted, the seconds of its check, and what its outputs showed."""

    is_admitted: bool
    check_s: float = 0.0
    slowest_ms: float = 0.0
    failed: str = ""


class Fault(Exception):
    def __init__(self, made: Guide, what: str) -> None:
        super().__init__(f"{what}\n  {made.kind}: {made.text[:400]!r}")


def new_check() -> GuideCheck:
    return GuideCheck(models.path() / "tokenizer.json", VOCABULARY, [END])


async def outcome(check: GuideCheck, made: Guide | InvalidRequest) -> Outcome:
    """Raise Fault for a guide that is admitted and gives no mask in ``MAX_SECONDS``."""
    if isinstance(made, InvalidRequest):
        return Outcome(is_admitted=False)
    began = time.monotonic()
    try:
        await check.check(made)
    except InvalidArgument:
        return Outcome(False, time.monotonic() - began)
    check_s, slowest = time.monotonic() - began, list[tuple[float, str]]()
    thread = Thread(target=lambda: slowest.append(_follow(made)), daemon=True)
    thread.start()
    thread.join(MAX_SECONDS)
    if not slowest:
        raise Fault(made, f"gave no mask in {MAX_SECONDS:g} s, or an error of Python")
    return Outcome(True, check_s, *slowest[0])


def _follow(made: Guide) -> tuple[float, str]:
    """Milliseconds of the slowest token with the mask behind it, and the error that ended an output."""
    grammar = compiler().grammar(made)
    grammar.prepare()
    slowest, failed = 0.0, ""
    for seed in range(OUTPUTS):
        took, error = _walk(grammar, random.Random(seed))
        slowest, failed = max(slowest, took), failed or error
    return slowest, failed


def _walk(grammar: Grammar, draw: random.Random) -> tuple[float, str]:
    matcher, slowest = grammar.new_matcher(), 0.0
    mask = matcher.compute_bitmask()
    for _ in range(MAX_TOKENS):
        if matcher.is_error():
            return slowest, matcher.get_error()
        token = int(draw.choice(allowed(mask).tolist()))
        if token == END:
            break
        before, began = matcher.deep_copy(), time.perf_counter()
        matcher.consume_token(token)
        mask = matcher.compute_bitmask()
        took = 1000 * (time.perf_counter() - began)
        for _ in range(REPETITIONS):
            if took < REPEATED_MS or matcher.is_error():
                break
            again, began = before.deep_copy(), time.perf_counter()  # perhaps the machine was busy
            again.consume_token(token)
            again.compute_bitmask()
            took = min(took, 1000 * (time.perf_counter() - began))
        slowest = max(slowest, took)
    return slowest, ""


async def fuzz(count: int, first: int) -> None:
    check, before = new_check(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    admitted = failed = 0
    slowest_check = slowest_mask = 0.0
    for seed in range(first, first + count):
        made = guide(seed)
        found = await outcome(check, made)
        if isinstance(made, Guide) and found.slowest_ms > MAX_MASK_MS:
            raise Fault(made, f"seed {seed}: a mask of {found.slowest_ms:.1f} ms")
        admitted, failed = admitted + found.is_admitted, failed + bool(found.failed)
        slowest_check, slowest_mask = max(slowest_check, found.check_s), max(slowest_mask, found.slowest_ms)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert grown <= MAX_GROWTH_MB, f"the process grew by {grown} MiB"
    print(f"{count} guides, {admitted} admitted, of which {failed} became too complex along an output; slowest check "
          f"{slowest_check:.2f} s, slowest token {slowest_mask:.1f} ms, {grown} MiB more; no fault")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guides", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--guides", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first guide")
    options = parser.parse_args()
    asyncio.run(fuzz(options.guides, options.seed))


if __name__ == "__main__":
    main()
