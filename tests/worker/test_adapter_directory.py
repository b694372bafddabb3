from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
from structlog.testing import capture_logs

from decant.decode_worker.main import DecodeSettings
from decant.engine.engine import Engine
from decant.protos import worker_pb2 as wire
from decant.runtime.serving.health import Readiness
from decant.worker.adapter_directory import FILES, LOOK_SECONDS, LOOKS_AT_ONE_FILE, AdapterDirectory
from decant.worker.main import Worker
from tests.router import virtual_time
from tests.worker.fake_process import load as load_fake
from tests.worker.harness import ADAPTER_NAMES, WorkerHarness, worker


def save(folder: Path, name: str, content: str) -> None:
    (folder / name).mkdir(exist_ok=True)
    for file in FILES:
        (folder / name / file).write_text(content)


class Watched:
    def __init__(self, folder: Path, harness: WorkerHarness) -> None:
        self.folder, self.harness = folder, harness
        self.announced = 0
        self.directory = AdapterDirectory(folder, harness.host.adapters)
        harness.host.adapters.changes.subscribe(self._count)

    def _count(self, _: None) -> None:
        self.announced += 1

    async def settle(self) -> Mapping[str, str]:
        """Look until a change of before is applied; return the digests by name of what the directory adds."""
        for _ in range(2):
            await self.directory.look()
        offered = self.harness.host.adapters.announcements
        return {adapter.name: adapter.digest for adapter in offered if adapter.name not in ADAPTER_NAMES}

    async def has(self, digest: str) -> bool:
        def look(engine: Engine) -> bool:
            return digest in engine.device.adapters

        return await self.harness.host.loop.call(look)


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    async with worker() as harness:
        yield Watched(tmp_path, harness)


async def test_folders_are_loaded_replaced_and_dropped(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    save(watched.folder, "two", "2")
    first = await watched.settle()
    assert set(first) == {"one", "two"}
    save(watched.folder, "one", "1, revised")
    second = await watched.settle()
    assert (second["one"] != first["one"], second["two"]) == (True, first["two"])
    assert [await watched.has(digest) for digest in (first["one"], second["one"])] == [False, True]
    shutil.rmtree(watched.folder / "two")
    assert await watched.settle() == {"one": second["one"]}
    assert not await watched.has(first["two"])
    assert watched.announced == 4
    await watched.settle()
    assert watched.announced == 4, "nothing has changed"


async def test_a_folder_that_is_being_written_is_not_read(watched: Watched) -> None:
    save(watched.folder, "one", "half")
    await watched.directory.look()
    save(watched.folder, "one", "the whole of it")
    await watched.directory.look()
    assert await watched.settle()
    assert watched.announced == 1


async def test_what_is_there_at_the_start_is_loaded_before_routers_know_the_worker(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    await watched.directory.begin()
    assert {adapter.name for adapter in watched.harness.host.adapters.announcements} >= {"one"}


async def test_a_replaced_file_waits_for_the_other_one(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    before = await watched.settle()
    (watched.folder / "one" / FILES[0]).write_text("the next config")
    assert await watched.settle() == before, "the next config with the weights before"
    save(watched.folder, "one", "1, revised")
    after = await watched.settle()
    assert after != before
    (watched.folder / "one" / FILES[0]).write_text("another config for these weights")
    for _ in range(LOOKS_AT_ONE_FILE):
        await watched.directory.look()
    assert await watched.settle() != after


async def test_a_directory_that_is_away_for_a_while_changes_nothing(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    before = await watched.settle()
    away = watched.folder.rename(watched.folder.with_name("away"))
    with capture_logs() as logged:
        assert await watched.settle() == before
    assert [line["event"] for line in logged] == ["the directory of adapters can't be read"]
    away.rename(watched.folder)
    assert await watched.settle() == before
    assert watched.announced == 1


async def test_an_adapter_that_can_t_be_loaded_for_any_reason_ends_nothing(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str, folder: Path) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(watched.harness.device.adapters, "load", fail)
    save(watched.folder, "one", "1")
    with capture_logs() as logged:
        assert await watched.settle() == {}
    assert [line["reason"] for line in logged] == ["MemoryError: out of memory"]


async def test_a_refused_folder_is_logged_once_and_leaves_what_its_name_stood_for(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    before = await watched.settle()
    shutil.copytree(watched.folder / "one", watched.folder / ADAPTER_NAMES[0])
    with capture_logs() as logged:
        for _ in range(3):
            assert await watched.settle() == before
    refused = [line for line in logged if line["event"] == "adapter refused"]
    assert [(line["name"], line["reason"]) for line in refused] == [
        (ADAPTER_NAMES[0], "--adapters or an administrator has the name")
    ]


async def test_folders_of_other_names_and_without_the_files_are_left_alone(watched: Watched) -> None:
    for name in (".hidden", "a b"):
        save(watched.folder, name, "1")
    (watched.folder / "empty").mkdir()
    (watched.folder / "file").write_text("1")
    assert await watched.settle() == {}


async def test_equal_folders_are_one_adapter_that_stays_while_a_name_stands_for_it(watched: Watched) -> None:
    save(watched.folder, "one", "1")
    save(watched.folder, "same", "1")
    digests = await watched.settle()
    assert digests["one"] == digests["same"]
    shutil.rmtree(watched.folder / "one")
    assert await watched.settle() == {"same": digests["same"]}
    assert await watched.has(digests["same"])


def test_a_look_that_fails_ends_neither_the_watch_nor_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = list[int]()

    async def fail_once(_: AdapterDirectory) -> None:
        looks.append(len(looks))
        if len(looks) == 1:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(AdapterDirectory, "look", fail_once)

    async def watch() -> Readiness:
        async with AsyncExitStack() as stack:
            one = Worker(DecodeSettings(model="any"), wire.ROLE_DECODE, load_fake, stack)
            await one._run("adapter directory", AdapterDirectory(tmp_path, Mock()).run)
            await asyncio.sleep(10 * LOOK_SECONDS)
            return one.readiness

    readiness = virtual_time.run(watch())
    assert len(looks) > 5
    assert readiness.is_alive
