"""NVIDIA's NIXL as the agent of ``memory_reads``: UCX reads over NVLink, InfiniBand, shared memory or TCP.

Tested between host memories only. The package's Python wrapper is not used: it sets the interval of the progress thread
to 0, which keeps one core busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from decant.engine.plan import BlockMemory
from decant.handoff.shared import Shared
from decant.protos import worker_pb2 as wire
from decant.runtime.heartbeat import loop_timeout

READ_SECONDS = 2.0
"""Time for one read, of at most a message's bytes; less than the silence after which the sender counts as lost."""

PROGRESS_US = 5_000
"""Interval of UCX's progress thread, beside the events that wake it."""

POLL_SECONDS = 0.0005
"""NIXL has no event for the end of a read."""

RETIRED = 16
"""Buffers of reads without an end that are kept, in case bytes still come."""


class NixlUnusable(Exception):
    pass


class NixlAgent:
    """``blocks`` are registered until ``aclose``, which must come before they are freed. ``name`` must be unique.

    Used by one thread at a time.
    """

    def __init__(self, name: str, blocks: BlockMemory, buffer_bytes: int, read_seconds: float = READ_SECONDS) -> None:
        """Raises NixlUnusable."""
        try:
            self.api: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise NixlUnusable(f"the package nixl cannot be imported ({error})") from error
        kinds = [kind for kind in vars(self.api).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors = tuple(kinds)
        self._name = name
        self.buffer_bytes, self.read_seconds = buffer_bytes, read_seconds
        self.retired: deque[bytearray] = deque(maxlen=RETIRED)
        self.peers: Shared[bytes, str] = Shared(self._connect, self._disconnect)
        self._reads: set[asyncio.Task[None]] = set()
        config = self.api.nixlAgentConfig()
        config.useProgThread, config.pthrDelay = True, PROGRESS_US
        try:
            self.agent = self.api.nixlAgent(name, config)
            self.ucx = [self.agent.createBackend("UCX", {})]
            segment = self.api.DRAM_SEG if blocks.gpu is None else self.api.VRAM_SEG
            self._blocks = self.api.nixlRegDList(segment, [(blocks.address, blocks.nbytes, blocks.gpu or 0, "")])
            self.agent.registerMem(self._blocks, self.ucx)
            metadata = self.agent.getLocalPartialMD(self._blocks, True, self.ucx)
        except self.errors as error:
            raise NixlUnusable(f"NIXL cannot register the KV cache ({error})") from error
        self.memory = wire.BlockMemory(agent=metadata, address=blocks.address, bytes=blocks.nbytes, gpu=blocks.gpu)

    def open(self, memory: wire.BlockMemory) -> NixlReader:
        return NixlReader(self, memory)

    def run(self, read: Any) -> asyncio.Task[None]:
        """Run a read until its end, which ``aclose`` awaits."""
        task: asyncio.Task[None] = asyncio.create_task(read)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        return task

    async def aclose(self) -> None:
        if self._reads:
            await asyncio.wait(self._reads)
        await self.peers.close()
        self.agent.deregisterMem(self._blocks, self.ucx)

    def _connect(self, metadata: bytes) -> str:
        if metadata == self.memory.agent:  # a worker may fetch from itself; NIXL refuses to load its own agent
            return self._name
        try:
            name: str = self.agent.loadRemoteMD(metadata)
        except self.errors as error:
            raise ConnectionError(f"NIXL cannot load the agent of the sender ({error})") from error
        return name

    def _disconnect(self, name: str) -> Coroutine[Any, Any, None]:
        """At once: an agent of that name may be loaded again."""
        with contextlib.suppress(*self.errors):
            self.agent.invalidateRemoteMD(name)
        return asyncio.sleep(0)


class NixlReader:
    """A ``SenderMemory``: reads into one registered buffer, which is released when the last read has ended."""

    def __init__(self, agent: NixlAgent, memory: wire.BlockMemory) -> None:
        """Raises ConnectionError."""
        self._agent = agent
        self._memory = memory
        self._exit = contextlib.ExitStack()
        self._peer = self._exit.enter_context(agent.peers.borrow(memory.agent))
        self._buffer = bytearray(agent.buffer_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._read: asyncio.Task[None] | None = None
        registered = agent.api.nixlRegDList(agent.api.DRAM_SEG, [(self._address, len(self._buffer), 0, "")])
        try:
            agent.agent.registerMem(registered, agent.ucx)
        except agent.errors as error:
            self._exit.close()
            raise ConnectionError(f"NIXL cannot register a buffer ({error})") from error
        self.is_registered = True
        self._exit.callback(self._deregister, registered)

    async def read(self, parts: Sequence[range]) -> memoryview:
        here, local, remote = self._address, [], []
        for part in parts:
            local.append((here, len(part), 0))
            remote.append((self._memory.address + part.start, len(part), self._memory.gpu))
            here += len(part)
        # A cancelled fetch does not stop its read: the buffer is in use until the end.
        self._read = self._agent.run(self._transfer(local, remote))
        await asyncio.shield(self._read)
        return memoryview(self._buffer)[: here - self._address]

    def close(self) -> None:
        if self._read is None or self._read.done():
            self._exit.close()
        else:
            self._read.add_done_callback(lambda _: self._exit.close())

    def _deregister(self, registered: Any) -> None:
        self._agent.agent.deregisterMem(registered, self._agent.ucx)
        self.is_registered = False

    async def _transfer(self, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]) -> None:
        """Raises ConnectionError; the next fetch connects again."""
        api, agent = self._agent.api, self._agent.agent
        segment = api.VRAM_SEG if self._memory.HasField("gpu") else api.DRAM_SEG
        try:
            with contextlib.ExitStack() as stack:
                descriptors = api.nixlXferDList(api.DRAM_SEG, local), api.nixlXferDList(segment, remote)
                request = agent.createXferReq(api.NIXL_READ, *descriptors, self._peer, "", self._agent.ucx)
                stack.callback(agent.releaseXferReq, request)
                state = agent.postXferReq(request)
                async with loop_timeout(self._agent.read_seconds):
                    while state == api.NIXL_IN_PROG:
                        await asyncio.sleep(POLL_SECONDS)
                        state = agent.getXferStatus(request)
        except TimeoutError:
            self._agent.retired.append(self._buffer)
            self._agent.peers.evict(self._memory.agent)
            limit = self._agent.read_seconds
            raise ConnectionError(f"NIXL has not read {len(local)} blocks in {limit:g} s") from None
        except self._agent.errors as error:
            self._agent.peers.evict(self._memory.agent)
            raise ConnectionError(f"NIXL cannot read the sender's blocks ({error})") from error
