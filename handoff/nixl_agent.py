"""NVIDIA's NIXL as the agent of ``memory_reads``: UCX reads over NVLink, InfiniBand, shared memory or TCP.

Tested between host memories only. The package's Python wrapper is not used: it sets the interval of the progress thread
to 0, which keeps one core busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from decant.engine.plan import BlockMemory
from decant.handoff.memory_reads import NoBuffer
from decant.handoff.shared_connections import SharedConnections
from decant.protos import worker_pb2 as wire
from decant.runtime.connections.heartbeat import loop_timeout
from decant.runtime.telemetry import logs

READ_SECONDS = 2.0
"""Time for one read, of at most a message's bytes; less than the silence after which the sender counts as lost."""

PROGRESS_US = 5_000
"""Interval of UCX's progress thread, beside the events that wake it."""

POLL_SECONDS = (0.0005, 0.005)
"""First and longest pause between two looks at a read: NIXL has no event for its end."""

IDLE_SECONDS = 3600.0
"""NIXL leaks endpoints when agents are loaded and removed often (ai-dynamo/nixl#2025)."""

BINDING_ERRORS = (RuntimeError, TypeError, ValueError, OverflowError)
"""Raised by the bindings beside NIXL's own errors: for an unknown status, or an integer beyond 64 bits."""

_log = logs.get(__name__)


class NixlUnusable(Exception):
    pass


@dataclass(frozen=True, slots=True, eq=False)
class _Peer:
    name: str


class NixlAgent:
    """NIXL agent of this process, used by one thread at a time.

    ``name`` must be unique. ``blocks`` are registered until ``aclose``, which must come before they are freed. The
    constructor raises NixlUnusable.
    """

    def __init__(self, name: str, blocks: BlockMemory, buffer_bytes: int, read_seconds: float = READ_SECONDS) -> None:
        try:
            self.api: Any = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise NixlUnusable(f"the package nixl cannot be imported ({error})") from error
        kinds = [kind for kind in vars(self.api).values() if isinstance(kind, type) and issubclass(kind, Exception)]
        self.errors: tuple[type[Exception], ...] = (*kinds, *BINDING_ERRORS)
        self._name = name
        self.buffer_bytes, self.read_seconds = buffer_bytes, read_seconds
        self.retired: list[NixlReader] = []
        """Closed readers whose buffers stay registered until ``aclose``: a read without success may still write."""
        self.peers: SharedConnections[bytes, _Peer] = SharedConnections(self._connect, self._disconnect, IDLE_SECONDS)
        self._loaded: Counter[str] = Counter()  # connections by name of the agent
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

    def reader(self) -> NixlReader:
        return NixlReader(self)

    def run(self, read: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(read)
        self._reads.add(task)
        task.add_done_callback(self._reads.discard)
        return task

    async def aclose(self) -> None:
        if self._reads:
            await asyncio.wait(self._reads)
        await self.peers.close()
        for reader in self.retired:
            reader.deregister()
        self.suppress_errors(self.agent.deregisterMem, self._blocks, self.ucx)

    def suppress_errors(self, call: Callable[..., object], *arguments: Any) -> bool:
        try:
            call(*arguments)
        except self.errors as error:
            _log.warning("NIXL failed to clean up", call=getattr(call, "__name__", ""), reason=str(error))
            return False
        return True

    def _connect(self, metadata: bytes) -> _Peer:
        name = self._name  # a worker may fetch from itself; NIXL refuses to load its own agent
        if metadata != self.memory.agent:
            try:
                name = self.agent.loadRemoteMD(metadata)
            except self.errors as error:
                raise ConnectionError(f"NIXL cannot load the agent of the sender ({error})") from error
        self._loaded[name] += 1
        return _Peer(name)

    def _disconnect(self, peer: _Peer) -> Coroutine[Any, Any, None]:
        """Disconnect before the coroutine runs: an agent of that name may be loaded again meanwhile."""
        self._loaded[peer.name] -= 1
        if not self._loaded[peer.name]:
            del self._loaded[peer.name]
            if peer.name != self._name:
                self.suppress_errors(self.agent.invalidateRemoteMD, peer.name)
        return asyncio.sleep(0)


class NixlReader:
    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._memory = wire.BlockMemory()
        self._peer = _Peer("")  # until ``connect``
        self._exit = contextlib.ExitStack()
        try:
            self._buffer = bytearray(agent.buffer_bytes)
        except MemoryError as error:
            raise NoBuffer(f"no memory for {agent.buffer_bytes} bytes") from error
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))
        self._read: asyncio.Task[None] | None = None
        self._may_be_written = False  # a read was posted, and has not ended with success
        try:
            self._registered = agent.api.nixlRegDList(agent.api.DRAM_SEG, [(self._address, len(self._buffer), 0, "")])
            agent.agent.registerMem(self._registered, agent.ucx)
        except agent.errors as error:
            raise NoBuffer(f"NIXL cannot register a buffer ({error})") from error
        self.is_registered = True

    def connect(self, memory: wire.BlockMemory) -> None:
        self._memory = memory
        self._peer = self._exit.enter_context(self._agent.peers.borrow(memory.agent))

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
            self._release()
        else:
            self._read.add_done_callback(lambda _: self._release())

    def _release(self) -> None:
        self._exit.close()
        if not self._may_be_written:
            self.deregister()
        if self.is_registered:
            self._agent.retired.append(self)

    def deregister(self) -> None:
        self.is_registered = not self._agent.suppress_errors(
            self._agent.agent.deregisterMem, self._registered, self._agent.ucx
        )

    async def _transfer(self, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]]) -> None:
        limit = self._agent.read_seconds
        try:
            await self._post(local, remote, limit)
        except TimeoutError:
            self._agent.peers.evict(self._memory.agent, self._peer)
            raise ConnectionError(f"NIXL has not read {len(local)} blocks in {limit:g} s") from None
        except self._agent.errors as error:
            self._agent.peers.evict(self._memory.agent, self._peer)
            raise ConnectionError(f"NIXL cannot read the sender's blocks ({error})") from error

    async def _post(
        self, local: list[tuple[int, int, int]], remote: list[tuple[int, int, int]], seconds: float
    ) -> None:
        api, agent = self._agent.api, self._agent.agent
        segment = api.VRAM_SEG if self._memory.HasField("gpu") else api.DRAM_SEG
        pause, longest = POLL_SECONDS
        with contextlib.ExitStack() as stack:
            descriptors = api.nixlXferDList(api.DRAM_SEG, local), api.nixlXferDList(segment, remote)
            request = agent.createXferReq(api.NIXL_READ, *descriptors, self._peer.name, "", self._agent.ucx)
            stack.callback(self._agent.suppress_errors, agent.releaseXferReq, request)
            self._may_be_written = True
            state = agent.postXferReq(request)
            async with loop_timeout(seconds):
                while state == api.NIXL_IN_PROG:
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.5, longest)
                    state = agent.getXferStatus(request)
            if state != api.NIXL_SUCCESS:
                raise RuntimeError(f"status {state}")
            self._may_be_written = False
