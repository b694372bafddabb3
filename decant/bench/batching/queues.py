from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from decant.bench.errors import InvalidBenchmark
from decant.bench.traffic.lengths import Exponential

MEAN_OUTPUT = 128
"""Mean in tokens, before the distribution is cut."""

QUEUE, EVERY, SLOTS = 32, 8, 8
"""Each EVERY-th of QUEUE answers is long; SLOTS of the longest fit into KV memory."""

BATCH_MULTIPLE = 4


@dataclass(frozen=True)
class Queue:
    """Requests that all wait at the start, with prompts of one length; `limit` is the longest possible output."""

    name: str
    prompt_len: int
    outputs: Sequence[int]
    limit: int
    kv_tokens: int
    is_exponential: bool = False

    @property
    def reserved(self) -> int:
        return self.kv_tokens // (self.prompt_len + self.limit)

    @property
    def batch_size(self) -> int:
        """Sequences of a static batch: those that fit, as a multiple of 4 like the published 16, 12, 8 and 4."""
        fit = self.reserved
        return fit // BATCH_MULTIPLE * BATCH_MULTIPLE or fit

    @property
    def batches(self) -> list[Sequence[int]]:
        size = self.batch_size
        return [self.outputs[at : at + size] for at in range(0, len(self.outputs), size)]


def every_eighth_long(prompt_len: int, short: int, long: int) -> Queue:
    outputs = [short if number % EVERY else long for number in range(1, QUEUE + 1)]
    return Queue("every eighth answer long", prompt_len, outputs, long, SLOTS * (prompt_len + long))


def uniform(prompt_len: int, output: int) -> Queue:
    return Queue("equal answers", prompt_len, [output] * QUEUE, output, SLOTS * (prompt_len + output))


def exponential(prompt_len: int, kv_tokens: int, cap: int, count: int, seed: int) -> Queue:
    rng, lengths = Random(seed), Exponential(MEAN_OUTPUT, cap)
    outputs = [lengths.draw(rng) for _ in range(count)]
    return Queue(f"exponential, at most {cap:,}", prompt_len, outputs, cap, kv_tokens, True)


def check(queue: Queue, context_length: int) -> None:
    longest = queue.prompt_len + queue.limit
    if longest > context_length:
        limit = f"at most {context_length:,} tokens with the prompt ({queue.name}; context length of the model)"
        raise InvalidBenchmark("outputs", limit, f"{longest:,}")
    if not queue.reserved:
        raise InvalidBenchmark("--kv-tokens", f"at least {longest:,} ({queue.name})", f"{queue.kv_tokens:,}")
