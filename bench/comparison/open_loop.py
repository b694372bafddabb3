"""Open loop over a server in this process: every request is sent at its time, regardless of open answers."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from bench.comparison.metrics import Served
from bench.comparison.subprocess_runner import OnProgress
from bench.workloads import Item

WARM_UP = (Item("warm-up", list(range(96)), 4, 0.0),)


class Server(Protocol):
    def add(self, item: Item) -> None:
        """Start a request with greedy decoding and a forced length."""
        ...

    def step(self) -> Iterable[str]:
        """Return one request id per new token; block while there are no tokens."""
        ...


def run_open_loop(server: Server, items: Sequence[Item], on_progress: OnProgress) -> list[Served]:
    waiting = deque(sorted(items, key=lambda item: item.arrival_s))
    tokens: dict[str, list[float]] = {item.id: [] for item in items}
    left, total, began = Counter[str](), sum(item.output_len for item in items), time.perf_counter()
    while waiting or left:
        now = time.perf_counter() - began
        while waiting and waiting[0].arrival_s <= now:
            item = waiting.popleft()
            left[item.id] = item.output_len
            server.add(item)
        if not left:
            time.sleep(waiting[0].arrival_s - now)
            continue
        for id in server.step():
            tokens[id].append(time.perf_counter() - began)
            left[id] -= 1
        left = +left
        on_progress(sum(map(len, tokens.values())) / total)
    for item in items:
        if len(tokens[item.id]) != item.output_len:
            raise RuntimeError(f"{item.id}: {len(tokens[item.id])} tokens, {item.output_len} were asked for")
    return [Served(item.id, len(item.prompt_token_ids), item.arrival_s, tokens[item.id]) for item in items]
