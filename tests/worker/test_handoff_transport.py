from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from structlog.testing import capture_logs

from decant.decode_worker.main import DecodeSettings
from decant.engine.fake import FakeDevice
from decant.handoff.memory_reads import MemoryReads
from decant.handoff.nixl_agent import NixlUnusable
from decant.handoff.transport import GrpcTransport, Transport
from decant.protos import worker_pb2 as wire
from decant.runtime.settings import SettingError
from decant.worker.startup import handoff_transport


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


async def make(handoff: str, seconds: float = 60) -> Transport:
    settings = DecodeSettings(model="any", handoff=handoff, allow_unauthenticated_peers=True)  # type: ignore[arg-type]
    device = FakeDevice(num_blocks=8, block_size=4)
    async with AsyncExitStack() as stack:
        return await handoff_transport.make_transport(settings, device, wire.Peer(id="w"), stack, seconds)


class Agent:
    memory = wire.BlockMemory()

    def __init__(self, *_: Any) -> None:
        self.is_closed = False

    async def aclose(self) -> None:
        self.is_closed = True


async def test_nixl_is_announced_before_it_starts_and_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[list[str]] = []

    class ClosableAgent(Agent):
        def __init__(self, *_: Any) -> None:
            super().__init__()
            before.append([line["log_level"] for line in logged])

    monkeypatch.setattr(handoff_transport, "NixlAgent", ClosableAgent)
    with capture_logs() as logged:
        transport = await make("nixl")
    assert before == [["warning", "info"]]
    assert "no authentication" in logged[0]["event"]
    assert isinstance(transport, MemoryReads)
    assert isinstance(transport.agent, ClosableAgent)
    assert transport.agent.is_closed


async def test_a_start_of_nixl_without_an_end_refuses_the_setting(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(handoff_transport, "NixlAgent", lambda *_: gate.wait())
    with pytest.raises(SettingError, match=r"NIXL has not started in 0\.05 s"):
        await make("nixl", 0.05)


async def test_an_unusable_nixl_refuses_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NixlUnusable("the package nixl cannot be imported")

    monkeypatch.setattr(handoff_transport, "NixlAgent", refuse)
    with pytest.raises(SettingError, match="cannot be imported"):
        await make("nixl")


async def test_messages_need_no_nixl() -> None:
    with capture_logs() as logged:
        assert isinstance(await make("grpc"), GrpcTransport)
    assert not logged
