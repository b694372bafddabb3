"""What a worker counts of prompts and handoffs."""

from __future__ import annotations

import pytest

from decant.handoff.errors import HandoffFailed
from decant.protos import worker_pb2 as wire
from decant.runtime.metrics import Registry
from decant.worker.report.metrics import WorkerMetrics
from decant.worker.wire_codec import to_request
from tests.worker.harness import MODEL, Place, make_work, worker


def values(registry: Registry) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in registry.text().decode().splitlines() if line.startswith("decant_")]
    return {name.removeprefix("decant_"): float(value) for name, value in lines}


async def take(place: Place, receiver: Place, name: str) -> None:
    work = make_work(30, 4)
    call = place.ask(work, request=f"t/{name}")
    ticket = await call.expect("ticket")
    await call.expect("first")
    await receiver.receive(ticket, to_request(name, work, model=MODEL))
    await receiver.written(name)


async def test_prompt_tokens_are_counted_by_where_their_cache_came_from() -> None:
    async with worker() as place, worker("d") as receiver:
        given, taken = Registry(process=False), Registry(process=False)
        place.connect(WorkerMetrics(given, place.host))
        receiver.connect(WorkerMetrics(taken, receiver.host))
        await take(place, receiver, "a")
        await take(place, receiver, "b")
        found = values(given)
        assert found['prompt_tokens_total{source="local_compute"}'] == 30 + 2
        assert found['prompt_tokens_total{source="local_cache_hit"}'] == 28
        assert found["generation_tokens_total"] == 2
        found = values(taken)
        assert found['prompt_tokens_total{source="local_compute"}'] == 0
        assert found['prompt_tokens_total{source="external_kv_transfer"}'] == 30 + 2
        assert found['prompt_tokens_total{source="local_cache_hit"}'] == 28
        assert (found["generation_tokens_total"], found["handoff_seconds_count"]) == (6, 2)
        assert found["handoff_bytes_sum"] == (8 + 1) * place.host.shape.block_bytes


async def test_a_failed_handoff_is_counted_by_its_cause() -> None:
    async with worker() as place, worker("d") as receiver:
        registry = Registry(process=False)
        receiver.connect(WorkerMetrics(registry, receiver.host))
        work = make_work(30, 4)
        gone = wire.Ticket(id=b"unknown", sender=place.host.peer, address=place.address, layout=place.host.layout)
        with pytest.raises(HandoffFailed):
            await receiver.receive(gone, to_request("late", work, model=MODEL))
        found = values(registry)
        assert found['handoff_failures_total{cause="lease_over"}'] == 1
        assert found["handoff_seconds_count"] == 0
