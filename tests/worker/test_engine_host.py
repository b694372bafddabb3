from __future__ import annotations

import asyncio
from dataclasses import dataclass

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.protos import worker_pb2 as wire
from decant.worker.engine_host import short_layout_hash
from tests.worker.harness import MODEL, make_work, worker
from tests.worker.requests import to_request
from tests.worker.waiting import eventually


@dataclass
class Queue:
    num_waiting: int
    waiting_tokens: int


async def test_the_load_counts_the_engine_and_the_queues_before_it() -> None:
    async with worker(blocks=32) as harness:
        host, loop = harness.host, harness.host.loop
        idle = host.load()
        assert (idle.total_blocks, idle.free_blocks, idle.cached_blocks, idle.leased_blocks) == (32, 32, 0, 0)
        assert (idle.running, idle.waiting, idle.queued_tokens) == (0, 0, 0)
        assert (idle.takes_prompts, idle.draining, idle.role) == (True, False, wire.ROLE_PREFILL)
        harness.device.hold()

        def add(engine: Engine) -> None:
            for number in range(2):
                engine.add(to_request(f"r{number}", make_work(40, 4, seed=number), model=MODEL))

        loop.post(add)
        looking = asyncio.create_task(host.sample_load())
        await asyncio.sleep(0)
        harness.device.let(2)
        await looking
        host.add_queue(Queue(num_waiting=2, waiting_tokens=0))
        host.add_queue(prompts := Queue(num_waiting=3, waiting_tokens=50))
        assert (host.num_waiting(), host.num_waiting(besides=prompts)) == (5, 2)
        busy = host.load()
        assert busy.running + busy.waiting == 2 + 2 + 3
        assert 50 < busy.queued_tokens <= 50 + 80
        looking = asyncio.create_task(host.sample_load())
        await asyncio.sleep(0)
        harness.device.let(2)
        await looking
        assert host.load().free_blocks < 32
        harness.device.go_on()
        while await loop.call(lambda engine: engine.has_work):  # they are no runs: an audit would ask whose they are
            pass


async def test_the_load_is_sampled_periodically() -> None:
    async with worker() as harness:
        await harness.host.loop.call(lambda engine: engine.add(to_request("r", make_work(40, 1), model=MODEL)))
        await harness.written("r")
        await eventually(lambda: harness.host.load().cached_blocks > 0)
        assert harness.host.load().running == 0


async def test_a_heartbeat_distinguishes_a_running_step_from_none() -> None:
    async with worker() as harness:
        host = harness.host
        assert not host.heartbeat().HasField("step_age_ms"), "idle"
        assert not host.step_heartbeat().HasField("load"), "a fetch needs none"
        await host.loop.call(lambda engine: engine.add(to_request("r", make_work(16, 3), model=MODEL)))
        await harness.written("r")
        before = host.heartbeat().step
        harness.device.hold()
        host.loop.post(lambda engine: engine.add(to_request("s", make_work(16, 3, seed=1), model=MODEL)))
        await eventually(lambda: host.heartbeat().step_age_ms >= 5)
        stuck = host.heartbeat()
        assert stuck.step == before, "no step ended meanwhile"
        assert stuck.load.total_blocks == 64
        harness.device.go_on()
        await harness.written("s")
        assert host.heartbeat().step > before


def test_layouts_are_equal_as_numbers_when_they_are_equal() -> None:
    one, same, other = (FakeDevice(block_size=size).layout_hash for size in (8, 8, 16))
    assert short_layout_hash(one) == short_layout_hash(same) != short_layout_hash(other)
    assert 0 <= short_layout_hash(one) < 2**64
