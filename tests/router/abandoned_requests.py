from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

from decant.protos.inference_pb2 import Generation
from decant.protos.state_pb2 import RequestRecord
from decant.router.recovery.takeover import OrphanRecovery
from decant.router.timings import TakeoverTimings
from decant.runtime.background import BackgroundTask
from decant.runtime.connections.peer import new_peer
from decant.state.ids import Incarnation, RequestKey, State
from decant.state.journal import Entry
from decant.state.keys import Ttls
from decant.state.owned import OwnedRequest
from decant.state.store import Store
from decant.state.store_instance import StoreInstance
from tests.router.fake_script import MODEL
from tests.router.harness import (
    Core,
    make_request,
)
from tests.state.factories import router_registration, write_request

TIMINGS = TakeoverTimings()
PROMPT = [1, 2, 3]
KEY = RequestKey("default", "r")


async def has_state(store: Store, state: State) -> bool:
    return (await store.requests.read(KEY)).state == state


async def left_behind(
    store: Store, *tokens: int, layout_hash: int | None = None, prompt_hash: int = 0, **asked: Any
) -> None:
    """Store a request with output `tokens`, whose router is not registered.

    `prompt_hash` is of the prompt that the router made; 0: it kept none.
    `layout_hash` is of the worker that ran it, which is lost too; 0: it promised no equal bits, None: it ran nowhere.
    """
    request = make_request(**asked)
    record = RequestRecord(model=MODEL, seed=4, prompt_tokens=3, prompt_hash=prompt_hash)
    if layout_hash is not None:
        record.attempts.add(attempt=1, decode_worker=new_peer("lost"), layout_hash=layout_hash)
    owned = OwnedRequest.begin(KEY, Incarnation("gone", 1), request.payload, record, datetime.now(UTC))
    await store.requests.accept(owned)
    owned.append(Entry(0, token) for token in tokens)
    owned.transition(Generation.STATE_DECODING, datetime.now(UTC))
    await write_request(store, owned)


@asynccontextmanager
async def watching(
    store: Store,
    harness: Core,
    refill_s: float = 0.0,
    registration_s: float = 0.2,
    is_connected: Callable[[Incarnation], bool] = lambda _: False,
    timings: TakeoverTimings = TIMINGS,
) -> AsyncIterator[None]:
    incarnation, ttls = Incarnation.of(harness.router.peer), Ttls(refill_s=refill_s, registration_s=registration_s)
    store.instance = StoreInstance(store._client, ttls)
    registration = await store.routers.register(router_registration(incarnation))
    takeover = OrphanRecovery(store, harness.requests, incarnation, is_connected, ttls, timings)
    try:
        async with BackgroundTask("takeover", takeover.run):
            yield
    finally:
        await registration.remove()
