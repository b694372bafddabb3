"""Useful sequences per step, by arithmetic: prompts cost nothing and steps are equal."""

from __future__ import annotations

from decant.bench.batching.queues import Queue

BLOCK = 16


def static(queue: Queue, *, pad_to_all: bool) -> float:
    longest = max(queue.outputs)
    return sum(queue.outputs) / sum(longest if pad_to_all else max(batch) for batch in queue.batches)


def paged(queue: Queue, block: int = BLOCK) -> float:
    total = queue.kv_tokens // block
    waiting = [(0, length) for length in reversed(queue.outputs)]
    running: list[tuple[int, int]] = []
    steps = 0
    while waiting or running:
        held = sum(_blocks(queue, done, block) for done, _ in running)
        while waiting and held + (needed := _blocks(queue, waiting[-1][0], block)) <= total:
            running.append(waiting.pop())
            held += needed
        running = [(done + 1, length) for done, length in running if done + 1 < length]
        while sum(_blocks(queue, done, block) for done, _ in running) > total:
            waiting.append(running.pop())
        steps += 1
    return sum(queue.outputs) / steps


def ratios(queue: Queue) -> tuple[float, float]:
    useful = paged(queue)
    return useful / static(queue, pad_to_all=True), useful / static(queue, pad_to_all=False)


def _blocks(queue: Queue, done: int, block: int) -> int:
    return -(-(queue.prompt_len + done) // block)
