from __future__ import annotations

import asyncio
from functools import partial

from decant.protos.state_pb2 import RouterRegistration, UnusedWorker
from decant.router.recovery.registration import RouterRegistrar
from decant.runtime.background import BackgroundTask
from decant.runtime.connections.peer import new_peer
from decant.state.store import Store
from tests.router.harness import PATIENCE


async def test_a_registration_names_the_workers_that_its_router_can_not_use_now(store: Store) -> None:
    unused: list[UnusedWorker] = []
    registration = RouterRegistration(peer=new_peer("router"), address="h:1")
    registrar = RouterRegistrar(store, registration, lambda: None, lambda: None, unused_workers=lambda: unused)

    async def wait_for(expected: list[UnusedWorker]) -> None:
        async with asyncio.timeout(PATIENCE):
            while True:
                present = (await store.routers.listing()).present
                if present and list(present[0].registration.unused_workers) == expected:
                    return
                await asyncio.sleep(0.01)

    async with BackgroundTask("renewing", partial(registrar.run, 0.02)):
        await wait_for([])
        unused.append(UnusedWorker(id="decode-1", incarnation=7, reason="another tokenizer"))
        await wait_for(list(unused))
        unused.clear()
        await wait_for([])
    await registrar.close()
