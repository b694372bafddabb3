"""Adapters of a worker within their memory: which are there, which leave, and what a run has meanwhile."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from decant.engine.errors import AdapterRefused, InvalidRequest
from decant.engine.fake import ADAPTER
from decant.protos import worker_pb2 as wire
from decant.protos import worker_pb2_grpc as services
from decant.runtime.errors import InvalidArgument, NotFound, from_call
from decant.runtime.telemetry.metrics import Registry
from decant.worker.adapter_store import AdapterStore
from decant.worker.report.metrics import WorkerMetrics
from tests.worker.harness import ADAPTER_NAMES, WorkerHarness, make_work, run_alone, worker
from tests.worker.waiting import PATIENCE, eventually

ONE = 1 << 20
"""Bytes of each adapter of a fake device."""


def save(folder: Path, content: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / ADAPTER).write_text(content)
    return folder


@asynccontextmanager
async def bounded(count: int) -> AsyncIterator[WorkerHarness]:
    """Worker with memory for ``count`` adapters that offers none."""
    async with worker(adapter_bytes=count * ONE) as harness:
        for name in ADAPTER_NAMES:
            harness.host.adapters.withdraw(name)
        yield harness


async def offer(store: AdapterStore, folder: Path, *names: str) -> list[str]:
    return [(await store.offer(name, save(folder / name, name))).digest for name in names]


def in_memory(store: AdapterStore) -> set[str]:
    return {adapter.name for adapter in store.announcements if adapter.in_memory}


async def on_device(harness: WorkerHarness) -> set[str]:
    return await harness.host.loop.call(lambda engine: set(engine.device.adapters._digests))  # type: ignore[attr-defined]


async def test_the_least_recently_used_ones_leave_and_a_use_loads_one_again(tmp_path: Path) -> None:
    async with bounded(2) as harness:
        store, registry = harness.host.adapters, Registry(process=False)
        WorkerMetrics(registry, harness.host)
        a, b, c = await offer(store, tmp_path, "a", "b", "c")
        assert in_memory(store) == {"b", "c"}
        assert all(digest in store for digest in (a, b, c)), "all are offered"
        with store.use(b) as use:
            await use.begin()
        with store.use(a) as use:
            await use.begin()
            assert in_memory(store) == {"a", "b"}
            assert await on_device(harness) == {a, b}
        text = registry.text().decode()
        for name, value in (("adapters_in_memory", 2), ("adapter_loads_total", 4), ("adapter_evictions_total", 2)):
            assert f"decant_{name} {value}.0\n" in text
        (line,) = [line for line in text.splitlines() if line.startswith("decant_adapter_memory_bytes ")]
        assert float(line.split()[1]) == 2 * ONE


async def test_an_adapter_in_use_stays_until_its_runs_have_ended_and_a_use_of_another_waits(tmp_path: Path) -> None:
    async with bounded(1) as harness:
        store = harness.host.adapters
        a, b = await offer(store, tmp_path, "a", "b")
        async with AsyncExitStack() as stack:
            for _ in range(2):
                await stack.enter_context(store.use(a)).begin()
            waiting = store.use(b)
            begun = asyncio.create_task(waiting.begin())
            await eventually(lambda: not in_memory(store))
            late = store.use(a)  # behind the one that waits: its adapter is to leave
            again = asyncio.create_task(late.begin())
            await asyncio.sleep(0.05)
            assert not begun.done()
            assert not again.done()
            assert await on_device(harness) == {a}
        await asyncio.wait_for(begun, PATIENCE)
        assert await on_device(harness) == {b}
        with waiting:
            pass
        await asyncio.wait_for(again, PATIENCE)
        with late:
            assert await on_device(harness) == {a}


async def test_a_use_that_is_cancelled_while_it_waits_leaves_what_was_to_leave(tmp_path: Path) -> None:
    async with bounded(1) as harness:
        store = harness.host.adapters
        a, b = await offer(store, tmp_path, "a", "b")
        with store.use(a) as use:
            await use.begin()
            begun = asyncio.create_task(store.use(b).begin())
            await eventually(lambda: not in_memory(store))
            begun.cancel()
            await asyncio.wait([begun])
            with store.use(a) as again:
                await asyncio.wait_for(again.begin(), PATIENCE)
        assert in_memory(store) == {"a"}


async def test_an_adapter_that_is_withdrawn_stays_for_its_runs_alone(tmp_path: Path) -> None:
    async with worker() as harness:
        store = harness.host.adapters
        (a,) = await offer(store, tmp_path, "a")
        with store.use(a) as use:
            await use.begin()
            assert store.withdraw("a") is not None
            assert a in store, "another attempt at a run that has it may come"
            assert "a" not in {adapter.name for adapter in store.announcements}
            assert a in await on_device(harness)
        assert a not in store
        assert a not in await on_device(harness)
        with pytest.raises(InvalidRequest, match="adapter: one that this worker has, got"):
            await store.use(a).begin()
        assert store.withdraw("a") is None


@pytest.mark.parametrize("change", ["gone", "another"])
async def test_a_folder_that_has_the_adapter_no_more_refuses_its_uses(change: str, tmp_path: Path) -> None:
    async with bounded(1) as harness:
        store = harness.host.adapters
        a, _ = await offer(store, tmp_path, "a", "b")
        if change == "gone":
            (tmp_path / "a" / ADAPTER).unlink()
        else:
            save(tmp_path / "a", "another")
        with pytest.raises(InvalidRequest, match=r"adapter: one whose folder (can )?still"):
            await store.use(a).begin()
        assert (in_memory(store), store.evictions) == ({"b"}, 1), "it makes no other one leave"
        work = make_work()
        work.adapter = a
        refused = await harness.ask(work).expect("refused")
        assert refused.failure.cause == wire.CAUSE_UNKNOWN_ADAPTER, "it goes elsewhere"


async def test_one_that_fits_no_memory_is_refused_by_name(tmp_path: Path) -> None:
    async with worker(adapter_bytes=ONE - 1) as harness:
        reason = re.escape(f"its matrices have {ONE} bytes, and --adapter-memory is {ONE - 1}")
        with pytest.raises(AdapterRefused, match=f"adapter a is not served: {reason}"):
            await harness.host.adapters.offer("a", save(tmp_path / "a", "a"))


async def test_answers_are_of_one_revision_while_adapters_are_added_replaced_and_removed(tmp_path: Path) -> None:
    rng = random.Random(7)
    revisions: dict[str, str] = {}
    async with bounded(2) as harness:
        store = harness.host.adapters

        async def change() -> None:
            for step in range(60):
                name = f"a{rng.randrange(4)}"
                if rng.random() < 0.25:
                    store.withdraw(name)
                else:
                    adapter = await store.offer(name, save(tmp_path / f"{name}-{step}", f"{name}-{step}"))
                    revisions[adapter.digest] = name
                assert store.nbytes <= 3 * ONE, "one more while it is read"
                await asyncio.sleep(0)

        async def ask(number: int) -> bool:
            offered = [adapter.digest for adapter in store.announcements]
            work = make_work(seed=number, wanted=6)
            work.adapter = rng.choice([*offered, ""])
            call = harness.ask(work, request=f"t/{number}", handoff=False)
            event = await call.next()
            assert event is not None
            if event.WhichOneof("event") == "refused":
                assert event.refused.failure.cause == wire.CAUSE_UNKNOWN_ADAPTER
                return False
            (first,) = event.first.tokens
            assert first.token == run_alone(work)[0], revisions.get(work.adapter)
            return True

        async def load(client: int) -> int:
            return sum([await ask(100 * client + number) for number in range(15)])

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(change())
            answered = [tasks.create_task(load(client)) for client in range(4)]
        assert sum(task.result() for task in answered) > 30
        await harness.emptied()
        for name in sorted(set(revisions.values())):
            store.withdraw(name)
        assert (await on_device(harness), store.nbytes) == (set(), 0)


async def test_a_run_that_waits_for_the_memory_of_its_adapter_can_be_cancelled(tmp_path: Path) -> None:
    async with bounded(1) as harness:
        store = harness.host.adapters
        a, b = await offer(store, tmp_path, "a", "b")
        with store.use(a) as use:
            await use.begin()
            work = make_work()
            work.adapter = b
            call = harness.ask(work)
            await harness.runs(1)
            await call.break_off()
            await harness.runs(0)
        await eventually(lambda: store._turn.locked() is False)


async def test_a_prompt_that_waits_for_its_turn_keeps_no_adapter_from_one_before_it(tmp_path: Path) -> None:
    """The one before it is admitted, and waits for memory; the queue is full until it ends."""
    async with bounded(1) as harness:
        a, b = await offer(harness.host.adapters, tmp_path, "a", "b")
        harness.device.hold()
        fills = 4 * 40  # tokens of more than half of the pool
        works = [make_work(fills, 1, seed=seed) for seed in range(3)]
        works[1].adapter, works[2].adapter = b, a
        works[2].age_ms = 60_000
        calls = []
        for number, work in enumerate(works):
            calls.append(harness.ask(work, request=f"t/{number}", handoff=False))
            await harness.runs(number + 1)
        harness.device.go_on()
        for call in calls:
            await call.expect("first")
            await call.ended()


async def admin(harness: WorkerHarness, method: str, **fields: Any) -> Any:
    request = getattr(wire, f"{method}Request")(worker=harness.host.peer, **fields)
    try:
        return await getattr(services.AdminStub(harness.channel), method)(request)
    except grpc.aio.AioRpcError as error:
        raise from_call(error) from None


async def test_an_administrator_adds_replaces_and_removes_an_adapter(tmp_path: Path) -> None:
    async with worker() as harness:
        store = harness.host.adapters
        for revision in ("1", "2"):
            folder = str(save(tmp_path / revision, revision))
            added = await admin(harness, "AddAdapter", name="one", folder=folder)
            (listed,) = [adapter for adapter in store.announcements if adapter.name == "one"]
            assert added.adapter == listed
            work = make_work()
            work.adapter = listed.digest
            call = harness.ask(work, request=f"t/{revision}", handoff=False)
            assert (await call.expect("first")).tokens[0].token == run_alone(work)[0]
        removed = await admin(harness, "RemoveAdapter", name="one")
        assert removed.adapter.digest == added.adapter.digest
        with pytest.raises(NotFound, match="adapter: one of pirate, poet, got one"):
            await admin(harness, "RemoveAdapter", name="one")


async def test_what_an_administrator_can_not_add_or_remove_is_refused_by_name(tmp_path: Path) -> None:
    async with worker() as harness:
        await harness.host.adapters.offer("watched", save(tmp_path / "watched", "w"), is_watched=True)
        folder = str(tmp_path / "watched")
        for method, fields, reason in (
            ("AddAdapter", {"name": "../x", "folder": folder}, "name: up to 128 letters"),
            ("AddAdapter", {"name": "x"}, "folder: a folder of the worker's machine, got nothing"),
            ("AddAdapter", {"name": "x", "folder": "/nowhere"}, "folder: an adapter that is served: /nowhere has no"),
            ("AddAdapter", {"name": "watched", "folder": folder}, "--adapter-directory has the name"),
            ("RemoveAdapter", {"name": "watched"}, "name: one that is not watched: --adapter-directory has the name"),
        ):
            with pytest.raises(InvalidArgument, match=reason):
                await admin(harness, method, **fields)
