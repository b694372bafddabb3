from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from decant.protos.inference_pb2 import GenerateRequest, Generation, ResponseOptions
from decant.protos.state_pb2 import RequestRecord, RouterRegistration, WorkerRegistration
from decant.protos.worker_pb2 import ROLE_DECODE, Peer, TokenLogprobs
from decant.runtime.protocol import PROTOCOL
from decant.state import keys
from decant.state.ids import Incarnation, RequestKey
from decant.state.journal import Entry
from decant.state.keys import Ttls
from decant.state.logprobs import Logprobs
from decant.state.open_requests import split_batches
from decant.state.owned import OwnedRequest
from decant.state.store import Store, StoreSettings

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
KEY = RequestKey("tenant", "request")

QUEUED, PREFILLING, HANDING_OFF, DECODING = (
    Generation.STATE_QUEUED,
    Generation.STATE_PREFILLING,
    Generation.STATE_HANDING_OFF,
    Generation.STATE_DECODING,
)
SUCCEEDED, FAILED, CANCELLED = Generation.STATE_SUCCEEDED, Generation.STATE_FAILED, Generation.STATE_CANCELLED


def make_store(url: str, deadline_s: float = 10.0, connections: int = 16, **ttls: float) -> Store:
    """Store with a long deadline, because other tests share the cores."""
    return Store(StoreSettings(url, deadline_s, connections, Ttls(**ttls)))


def router(number: int = 1) -> Incarnation:
    return Incarnation(f"router-{number}", (1 << 63) + number)


def make_request(
    key: RequestKey = KEY,
    owner: Incarnation | None = None,
    prompt: str = "once",
    tokens: Iterable[int] = (),
    shown: ResponseOptions | None = None,
) -> OwnedRequest:
    payload = GenerateRequest(request_id=key.id, prompt=prompt, response=shown)
    request = OwnedRequest.begin(key, owner or router(), payload, RequestRecord(model="m"), NOW)
    continued(request, *tokens)
    return request


def continued(request: OwnedRequest, *tokens: int) -> None:
    alternatives = request.logprobs_options.output
    found = [] if alternatives is None else [logprobs(token, alternatives) for token in tokens]
    request.append(written(*tokens), packed(found, alternatives or 0))


def logprobs(token: int, alternatives: int) -> TokenLogprobs:
    top = range(token, token + alternatives)
    return TokenLogprobs(logprob=-token - 0.5, rank=token, top_ids=top, top_logprobs=[-0.25 * id for id in top])


def packed(found: Iterable[TokenLogprobs], alternatives: int) -> bytes:
    kept = Logprobs(alternatives)
    kept.extend(found)
    return kept.packed()


async def write_request(store: Store, request: OwnedRequest) -> None:
    """Write one request. Raises Superseded, AlreadyExists, StoreFault."""
    for error in (await store.requests.flush([request])).values():
        raise error


async def list_open(store: Store, owner: Incarnation, requests: Sequence[RequestKey]) -> None:
    """Write open entries alone."""
    await store._client.run_all([store.open.add_command(owner, batch) for batch in split_batches(requests)])


def written(*tokens: int) -> list[Entry]:
    return [Entry(0, token) for token in tokens]


def router_registration(incarnation: Incarnation) -> RouterRegistration:
    return RouterRegistration(
        peer=Peer(id=incarnation.id, incarnation=incarnation.incarnation, protocol=PROTOCOL), address="host:1"
    )


def worker_registration(incarnation: Incarnation, address: str = "host:2") -> WorkerRegistration:
    peer = Peer(id=incarnation.id, incarnation=incarnation.incarnation, protocol=PROTOCOL)
    return WorkerRegistration(peer=peer, address=address, role=ROLE_DECODE, layout_hash=(1 << 64) - 1)


def everything(bare: Any) -> dict[bytes, Any]:
    found: dict[bytes, Any] = {}
    for key in bare.keys("*"):
        match bare.type(key):
            case b"hash":
                found[key] = bare.hgetall(key)
            case b"set":
                found[key] = bare.smembers(key)
            case b"zset":
                found[key] = set(bare.zrange(key, 0, -1))
            case b"string":
                found[key] = bare.get(key)
    return found


def pass_time(bare: Any, seconds: float) -> None:
    """Age everything in Redis, so that tests of TTLs do not wait."""
    ms = round(seconds * 1000)
    for key in bare.keys("*"):
        if bare.type(key) == b"zset":
            for member in bare.zrange(key, 0, -1):
                bare.zincrby(key, -ms, member)
        elif key == keys.STORE_INSTANCE.encode():
            bare.hincrby(key, "began", -ms)
        elif key.endswith(b":full_at"):
            bare.decrby(key, ms * 1000)
            continue  # its lifetime is its value
        if (left_ms := bare.pttl(key)) > 0:
            bare.pexpire(key, max(0, left_ms - ms))
