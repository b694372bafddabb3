from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity, WorkerRegistration
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.request.valid_request import ValidRequest
from decant.state.store import Store
from tests.engine.factories import evict_all
from tests.router.fake_script import TOKENIZER
from tests.router.harness import core, make_request, tokens_of, until
from tests.worker.decode_harness import BLOCK, Node

SHARED = tuple(n % 60 for n in range(10 * BLOCK))


@dataclass
class Registered:
    registration: WorkerRegistration


@asynccontextmanager
async def nodes(*names: str, blocks: int = 64) -> AsyncIterator[list[tuple[Node, Registered]]]:
    if not names:
        yield []
        return
    async with Node(names[0], blocks=blocks, lease_ms=600_000) as node, nodes(*names[1:], blocks=blocks) as others:
        capacity = Capacity(total_blocks=blocks, block_size=BLOCK, max_context_length=blocks * BLOCK, max_running=8)
        registration = WorkerRegistration(
            peer=node.peer,
            role=wire.ROLE_DECODE,
            model="m",
            layout_hash=node.host.layout_hash,
            tokenizer=TOKENIZER,
            capacity=capacity,
            address=node.address,
        )
        yield [(node, Registered(registration)), *others]


def valid_request(id: str, *tail: int) -> ValidRequest:
    request = make_request(id, (*SHARED, *tail), max_tokens=3)
    request.engine_request.salt = b"tenant"
    request.engine_request.sampling.top_p = request.engine_request.sampling.repetition_penalty = 1
    return request


async def test_a_router_follows_the_cached_blocks_of_its_workers(store: Store) -> None:
    async with nodes("a", "b", blocks=32) as pair:
        registered = [listed for _, listed in pair]
        async with core(store, registered, id="first") as harness:  # type: ignore[arg-type]
            stream = await harness.answer(valid_request("r", 1))
            assert len(tokens_of(stream)) == 3
            holder = stream.trace.decode_worker
        async with core(store, registered, id="second") as harness:  # type: ignore[arg-type]
            pool, prefix = harness.router.pool, PromptBlocks(valid_request("s", 2).engine_request)

            def known() -> dict[str, int]:
                return {seen.incarnation.id: seen.cached_tokens for seen in pool.snapshot("m", set(), prefix)}

            await until(lambda: known() == {holder: len(SHARED), "b" if holder == "a" else "a": 0})
            stream = await harness.answer(valid_request("s", 2))
            assert stream.trace.decode_worker == holder
            assert stream.cached_tokens == len(SHARED)
            node = next(node for node, _ in pair if node.peer.id == holder)
            await node.host.loop.call(lambda engine: evict_all(engine.pool))
            await until(lambda: set(known().values()) == {0})
