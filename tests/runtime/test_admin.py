import asyncio

import pytest

from decant.runtime.serving.admin import AdminServer
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server_settings import is_loopback
from decant.runtime.telemetry.metrics import Registry
from tests.worker.waiting import PATIENCE

PAGE_BYTES = 32 << 20
"""More than the buffers of both sockets hold."""


async def test_a_client_that_does_not_read_its_page_loses_the_connection() -> None:
    registry = Registry(process=False)
    registry.pages["/page"] = lambda: b"x" * PAGE_BYTES
    admin = AdminServer(Readiness(), registry, call_seconds=0.1)
    port = await admin.start("127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /page HTTP/1.1\r\n\r\n")
    await asyncio.sleep(0.5)
    async with asyncio.timeout(PATIENCE):
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(PAGE_BYTES)
        await admin.close()
    writer.close()


@pytest.mark.parametrize(("caller", "status"), [("127.0.0.1", b"200"), ("::1", b"200"), ("10.1.2.3", b"403")])
def test_pages_with_ids_are_for_callers_on_this_machine(caller: str, status: bytes) -> None:
    registry = Registry(process=False)
    registry.pages["/requests"] = lambda: b"{}"
    admin = AdminServer(Readiness(), registry)
    answer = admin._answer("GET /requests HTTP/1.1", is_local=is_loopback(caller))
    assert answer.split(b" ")[1] == status
    assert admin._answer("GET /metrics HTTP/1.1", is_local=False).split(b" ")[1] == b"200"
