from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from decant.engine.plan import BlockMemory
from decant.handoff.memory_reads import NoBuffer
from decant.handoff.nixl_agent import NixlAgent, NixlReader, NixlUnusable
from decant.protos import worker_pb2 as wire
from tests.handoff.harness import NEEDS_NIXL
from tests.worker.waiting import PATIENCE, eventually

SIZE = 1 << 20
OWNER = f"""
import ctypes, sys
sys.modules["torch"] = None  # the package nixl would import it, to see its version of CUDA
from decant.engine.plan import BlockMemory
from decant.handoff.nixl_agent import NixlAgent
data = bytearray(bytes(range(256)) * {SIZE // 256})
agent = NixlAgent("owner", BlockMemory(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data)), 1)
print(agent.memory.SerializeToString().hex(), flush=True)
sys.stdin.read()
"""


class Owner:
    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    async def memory(self) -> wire.BlockMemory:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), PATIENCE)
        return wire.BlockMemory.FromString(bytes.fromhex(line.decode()))

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Owner]:
    """Owner over TCP, where a read needs the help of its process."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    owner = Owner()
    yield owner
    owner.process.kill()
    owner.process.communicate()


@asynccontextmanager
async def reader_of(owner: Owner) -> AsyncIterator[tuple[NixlAgent, wire.BlockMemory]]:
    own = bytearray(SIZE)
    blocks = BlockMemory(ctypes.addressof(ctypes.c_char.from_buffer(own)), SIZE)
    async with aclosing(NixlAgent("reader", blocks, SIZE, read_seconds=PATIENCE)) as agent:
        yield agent, await owner.memory()


def open_reader(agent: NixlAgent, memory: wire.BlockMemory) -> NixlReader:
    reader = agent.reader()
    reader.connect(memory)
    return reader


class Failing:
    def __init__(self, agent: Any, *calls: str, **results: Any) -> None:
        self._agent = agent
        self._failing = calls
        self._results = results
        self.calls: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls[name] += 1
            result = getattr(self._agent, name)(*arguments)
            if name in self._failing:
                raise ValueError("a fault")
            return self._results.get(name, result)

        return call


@NEEDS_NIXL
async def test_parts_of_another_process_are_read_in_order(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        assert bytes(await reader.read([range(SIZE - 2, SIZE), range(5), range(65, 68)])) == b"\xfe\xff\0\1\2\3\4ABC"
        assert bytes(await reader.read([range(SIZE)])) == bytes(range(256)) * (SIZE // 256)
        with pytest.raises(ConnectionError):
            await reader.read([range(SIZE, SIZE + 1)])
        reader.close()
        assert not agent.peers


@NEEDS_NIXL
async def test_the_memory_of_a_lost_process_is_an_error_and_its_connection_is_closed(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        owner.process.kill()
        with pytest.raises(ConnectionError):
            await reader.read([range(SIZE)])
        reader.close()
        assert not agent.peers


@NEEDS_NIXL
async def test_a_read_without_an_end_has_a_deadline_and_its_buffer_is_not_freed(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        owner.stop()
        agent.read_seconds = 0.3
        with pytest.raises(ConnectionError, match=r"in 0\.3 s"):
            await reader.read([range(SIZE)])
        reader.close()
        assert agent.retired == [reader]
        assert reader.is_registered
        assert not agent.peers
    assert not reader.is_registered


@NEEDS_NIXL
@pytest.mark.parametrize("call", ["postXferReq", "getXferStatus"])
async def test_a_posted_read_that_fails_keeps_its_buffer_registered_until_the_end(owner: Owner, call: str) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        agent.agent = Failing(agent.agent, call, postXferReq=agent.api.NIXL_IN_PROG)
        with pytest.raises(ConnectionError, match="a fault"):
            await reader.read([range(SIZE)])
        reader.close()
        assert agent.retired == [reader]
        assert reader.is_registered
    assert not reader.is_registered


@NEEDS_NIXL
async def test_errors_of_clean_up_are_not_raised_and_keep_the_buffer(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        agent.agent = Failing(agent.agent, "deregisterMem", "invalidateRemoteMD", "releaseXferReq")
        assert bytes(await reader.read([range(65, 68)])) == b"ABC"
        reader.close()
        assert agent.retired == [reader]


@NEEDS_NIXL
async def test_an_address_beyond_64_bits_is_a_connection_error(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, wire.BlockMemory(agent=memory.agent, address=2**64 - 1, bytes=SIZE))
        with pytest.raises(ConnectionError):
            await reader.read([range(1, 5)])
        reader.close()
        assert not agent.retired


@NEEDS_NIXL
async def test_a_long_read_is_looked_at_less_often(owner: Owner) -> None:
    """The interval between looks grows from 0.5 ms to 5 ms."""
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        endless = agent.api.NIXL_IN_PROG
        agent.agent = Failing(agent.agent, postXferReq=endless, getXferStatus=endless)
        agent.read_seconds = 0.5
        with pytest.raises(ConnectionError, match="has not read"):
            await reader.read([range(SIZE)])
        assert 2 < agent.agent.calls["getXferStatus"] < 200
        reader.close()


@NEEDS_NIXL
async def test_a_failed_read_leaves_the_connection_to_other_fetches(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        agent.agent = Failing(agent.agent)
        first, second = open_reader(agent, memory), open_reader(agent, memory)
        with pytest.raises(ConnectionError):
            await first.read([range(SIZE, SIZE + 1)])
        first.close()
        third = open_reader(agent, memory)
        with pytest.raises(ConnectionError):  # of the connection that is no longer shared
            await second.read([range(SIZE, SIZE + 1)])
        assert bytes(await second.read([range(65, 68)])) == b"ABC"
        second.close()
        assert bytes(await third.read([range(65, 68)])) == b"ABC"
        assert len(agent.peers) == 1
        assert not agent.agent.calls["invalidateRemoteMD"]
        third.close()
    assert agent.agent.calls["invalidateRemoteMD"] == 1


@NEEDS_NIXL
async def test_the_buffer_of_a_cancelled_read_is_released_after_its_end(owner: Owner) -> None:
    async with reader_of(owner) as (agent, memory):
        reader = open_reader(agent, memory)
        await reader.read([range(5)])
        owner.stop()
        reading = asyncio.create_task(reader.read([range(SIZE)]))
        await asyncio.sleep(0.1)
        reading.cancel()
        await asyncio.wait([reading])
        reader.close()
        assert reader.is_registered
        owner.process.send_signal(signal.SIGCONT)
        await eventually(lambda: not reader.is_registered)
        assert not agent.retired


@NEEDS_NIXL
async def test_an_agent_reads_its_own_memory() -> None:
    data = bytearray(b"0123456789")
    blocks = BlockMemory(ctypes.addressof(ctypes.c_char.from_buffer(data)), len(data))
    async with aclosing(NixlAgent("self", blocks, SIZE, read_seconds=PATIENCE)) as agent:
        reader = open_reader(agent, agent.memory)
        assert bytes(await reader.read([range(7, 10), range(2)])) == b"78901"
        reader.close()


@NEEDS_NIXL
async def test_an_unknown_agent_is_a_connection_error(owner: Owner) -> None:
    async with reader_of(owner) as (agent, _):
        with pytest.raises(ConnectionError, match="cannot load the agent"):
            open_reader(agent, wire.BlockMemory(agent=b"no metadata"))
        assert not agent.peers


@NEEDS_NIXL
async def test_a_buffer_that_cannot_be_registered_is_no_fault_of_a_sender(owner: Owner) -> None:
    async with reader_of(owner) as (agent, _):
        agent.agent = Failing(agent.agent, "registerMem")
        with pytest.raises(NoBuffer, match="a fault"):
            agent.reader()


def test_without_the_package_the_agent_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NixlUnusable, match="package nixl cannot be imported"):
        NixlAgent("a", BlockMemory(0, 0), 1)
