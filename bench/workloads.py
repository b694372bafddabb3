"""Requests and their arrival times from seeded generators, as a file for `decant bench --dataset`.

python -m bench.workloads --workload exponential --vocab-size 151936 --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from types import MappingProxyType

from bench.options import positive
from decant.bench.traffic.workload_file import InvalidWorkload, Item, check, read, write

__all__ = ["GENERATORS", "InvalidWorkload", "Item", "check", "exponential", "long_prompts", "mixed", "read", "write"]

LONGEST_OUTPUT = 256


def exponential(vocab_size: int, seed: int = 0, *, count: int = 64, prompt: int = 128, mean: float = 64) -> list[Item]:
    rng = Random(seed)
    return [_item(rng, vocab_size, f"exp-{n}", prompt, _output_len(rng, mean), 0.0) for n in range(count)]


def long_prompts(vocab_size: int, seed: int = 0, *, count: int = 8, output: int = 128) -> list[Item]:
    rng = Random(seed)
    return [_item(rng, vocab_size, f"long-{n}", rng.randint(1500, 2000), output, 0.0) for n in range(count)]


def mixed(vocab_size: int, seed: int = 0, *, long_at: float = 3.0) -> list[Item]:
    rng = Random(seed)
    running = [_item(rng, vocab_size, f"run-{n}", 128, 384, 0.0) for n in range(8)]
    return [*running, _item(rng, vocab_size, "long-0", 3000, 32, long_at)]


GENERATORS: Mapping[str, Callable[[int, int], list[Item]]] = MappingProxyType(
    {"exponential": exponential, "long-prompts": long_prompts, "mixed": mixed}
)


def _output_len(rng: Random, mean: float) -> int:
    while True:
        length = math.ceil(rng.expovariate(1 / mean))
        if 1 <= length <= LONGEST_OUTPUT:
            return length


def _item(rng: Random, vocab_size: int, id: str, prompt: int, output: int, arrival: float) -> Item:
    return Item(id, [rng.randrange(vocab_size) for _ in range(prompt)], output, arrival)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.workloads", description="write a workload to a file")
    parser.add_argument("--workload", choices=list(GENERATORS), required=True)
    parser.add_argument("--vocab-size", type=positive, required=True, help="prompts are random tokens below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    write(GENERATORS[args.workload](args.vocab_size, args.seed), args.out)


if __name__ == "__main__":
    main()
