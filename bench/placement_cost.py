"""CPU time of one placement in a router, over the number of workers.

    python -m bench.placement_cost [--workers 10 100 1000] [--json OUT]

The router's own pool, half prefill and half decode workers; no process answers. A request is a search for and a
reservation of each; every eighth placement a heartbeat changes a worker. Figures are this process's CPU time for one
search, the least of ``--rounds``.

    distinct    prompts share nothing
    shared      each prompt begins with the same 512 tokens, which all workers have cached
    session     prompts share nothing, and name a session
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import machine
from bench.options import add_json, positive, write_result
from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.policy import PlacementRequest, choose_decode_worker, choose_first_worker
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.workers.pool import WorkerPool
from decant.router.workers.session import WorkerSession
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.connections.tls import PeerTls
from decant.runtime.packed import pack

GOAL_MS = 0.3
GOAL_WORKERS = 100
MODEL = "model"
ROUTER = wire.Peer(id="router", incarnation=1)
BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
SHARED_TOKENS = 512
PROMPTS = 200
CASES = ("distinct", "shared", "session")


class NoWorkers:
    def stream_stream(self, *_: object, **__: object) -> None:
        return None

    unary_unary = unary_stream = stream_unary = stream_stream


def new_pool(workers: int) -> WorkerPool:
    unused: Any = NoWorkers()
    pool = WorkerPool(ROUTER, unused, {MODEL: {1}}, PeerTls(), handoff_min_tokens=64)
    for number in range(workers):
        registration = WorkerRegistration(
            peer=wire.Peer(id=f"worker-{number}", incarnation=1),
            model=MODEL,
            role=wire.ROLE_DECODE if number % 2 else wire.ROLE_PREFILL,
            layout_hash=1,
            capacity=Capacity(total_blocks=8192, block_size=BLOCK_SIZE),
        )
        session = WorkerSession(ROUTER, registration.peer, unused, pool)
        session._outgoing.open([])
        index = pool.membership.prefix_indexes[MODEL]
        worker = WorkerHandle(registration, unused, session, 0, index=index)
        pool.membership._workers[worker.incarnation] = worker
    return pool


def new_prompts(case: str) -> list[PromptBlocks]:
    rng = Random(0)
    shared = [rng.randrange(50_000) for _ in range(SHARED_TOKENS if case == "shared" else 0)]
    prompts = []
    for _ in range(PROMPTS):
        own = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS - len(shared))]
        prompts.append(PromptBlocks(wire.EngineRequest(prompt=pack(shared + own))))
        prompts[-1].hashes(BLOCK_SIZE)  # a router does it once for a request, not for a search
    return prompts


def place(pool: WorkerPool, prompt: PromptBlocks, session: str) -> None:
    request = PlacementRequest(PROMPT_TOKENS, session=session, handoff_min_tokens=pool.handoff_min_tokens(MODEL))
    first = choose_first_worker(pool.snapshot(MODEL, frozenset(), prompt), request)
    assert first is not None
    prefill = pool.worker(first.incarnation).load.reserve(prompt, PROMPT_TOKENS, computes_prompt=True)
    decode = choose_decode_worker(pool.snapshot(MODEL, frozenset(), prompt), request, 1, first.incarnation)
    assert decode is not None
    pool.worker(decode).load.reserve(prompt, PROMPT_TOKENS, computes_prompt=False)
    prefill.release()


def warm(pool: WorkerPool, case: str, prompts: Sequence[PromptBlocks]) -> None:
    if case == "shared":
        shared = prompts[0].hashes(BLOCK_SIZE)[: SHARED_TOKENS // BLOCK_SIZE]
        heartbeat = wire.Heartbeat(cache=wire.PrefixCacheUpdate(published=shared.tobytes()))  # type: ignore[attr-defined]
        for worker in pool.of(MODEL):
            worker.load.apply_heartbeat(heartbeat)


def search_ms(workers: int, case: str, rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds):
        pool, prompts = new_pool(workers), new_prompts(case)
        warm(pool, case, prompts)
        workers_in_turn = itertools.cycle(list(pool.of(MODEL)))
        heartbeat = wire.Heartbeat(load=wire.Load(free_blocks=8192, takes_prompts=True))
        began = time.process_time()
        for number, prompt in enumerate(prompts):
            place(pool, prompt, f"session {number}" if case == "session" else "")
            if number % 8 == 0:
                next(workers_in_turn).load.apply_heartbeat(heartbeat)
        best = min(best, time.process_time() - began)
    return 1000 * best / (2 * len(prompts))


async def measure(workers: Sequence[int], rounds: int) -> dict[str, dict[str, float]]:
    """Measure all cases; a coroutine, because a pool needs an event loop."""
    return {case: {str(count): search_ms(count, case, rounds) for count in workers} for case in CASES}


def show(figures: dict[str, dict[str, float]], console: Console) -> None:
    table = Table(box=None, title="CPU of one placement, ms")
    table.add_column("workers", justify="right")
    for case in CASES:
        table.add_column(case, justify="right")
        table.add_column("of goal", justify="right")
    for count in figures[CASES[0]]:
        cells = [f"{figures[case][count]:.3f}" for case in CASES]
        limits = [f"{figures[case][count] / GOAL_MS:.2f}" if int(count) == GOAL_WORKERS else "" for case in CASES]
        table.add_row(count, *itertools.chain(*zip(cells, limits, strict=True)))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement_cost", description="CPU time of one placement")
    parser.add_argument("--workers", type=positive, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=positive, default=5)
    add_json(parser)
    args = parser.parse_args()
    figures = asyncio.run(measure(args.workers, args.rounds))
    result = {"cpu_ms": figures, "goal_ms": GOAL_MS, "goal_workers": GOAL_WORKERS, "machine": machine.facts()}
    write_result(result, args.json, lambda: show(figures, Console()))


if __name__ == "__main__":
    main()
