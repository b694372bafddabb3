import asyncio

import pytest

from decant.runtime.serving.admin import AdminServer
from decant.runtime.serving.health import Readiness
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
