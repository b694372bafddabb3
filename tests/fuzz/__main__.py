"""Feed mutated inputs to every decoder: python -m tests.fuzz [--inputs N] [--seed N] [--only NAME].

A decoder accepts an input, or refuses it by an error that its caller expects. Anything else ends the run.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from tests.fuzz.targets import Target, targets

MAX_SECONDS = 5.0
MAX_GROWTH = 256 << 20
"""Bytes by which the process may grow in a run, of any number of inputs."""


class Outcome(NamedTuple):
    accepted: int
    refused: int
    slowest_s: float


class Fault(Exception):
    def __init__(self, target: str, data: bytes, what: str) -> None:
        super().__init__(f"{target}: {what}\n  input ({len(data)} bytes): {data[:400]!r}")


def fuzz(target: Target, inputs: int, choose: random.Random) -> Outcome:
    """Raise Fault for the first input that the decoder neither accepts nor refuses, or that takes too long."""
    refused, slowest = 0, 0.0
    for number in range(inputs):
        seed = choose.choice(target.seeds)
        data = target.mutator(seed, choose) if number else seed
        began = time.thread_time()
        try:
            target.decode(data)
        except target.refusals:
            refused += 1
        except Exception as error:
            raise Fault(target.name, data, f"{type(error).__name__}: {error}") from error
        slowest = max(slowest, took := time.thread_time() - began)
        if took > MAX_SECONDS:
            raise Fault(target.name, data, f"took {took:.1f} s")
    return Outcome(inputs - refused, refused, slowest)


@contextmanager
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown <= MAX_GROWTH, f"the process grew by {grown >> 20} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="one decoder")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    with targets() as known, bounded_memory():
        chosen = [one for one in known if options.only in (None, one.name)]
        total = 0
        for target in chosen:
            inputs = -(-options.inputs // len(chosen))
            outcome = fuzz(target, inputs, random.Random(f"{options.seed} {target.name}"))
            total += inputs
            print(f"{target.name:<24} {outcome.accepted:>7} accepted {outcome.refused:>7} refused"
                  f"   slowest {outcome.slowest_s * 1e3:.1f} ms", flush=True)  # fmt: skip
    print(f"{total} inputs, no fault")


if __name__ == "__main__":
    main()
