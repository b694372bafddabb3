"""A router's process before scripted workers, called over gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.errors import ServiceError, from_call
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.e2e.fork_server import Forked
from tests.router.fake_script import answer
from tests.router.fake_worker import FakeWorker, fleet
from tests.router.harness import PATIENCE, until
from tests.router.test_router_process import become_ready, router, usable

PROMPT = [1, 2, 3]
BOTH = (("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE))
NO_LIMITS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@dataclass
class Harness:
    stub: InferenceServiceStub
    channel: grpc.aio.Channel
    workers: list[FakeWorker]
    address: str
    process: Forked
    admin_port: int | None = None

    def stream(self, count: int = 5, **fields: Any) -> Any:
        return self.stub.GenerateStream(generate_request(count, **fields), timeout=PATIENCE)

    async def is_unharmed(self) -> None:
        async with grpc.aio.insecure_channel(self.address) as channel:
            found = await InferenceServiceStub(channel).Generate(generate_request(5), timeout=PATIENCE)
        assert list(found.outputs[0].token_ids) == answer(PROMPT, 5)

    async def error_of(self, call: Any) -> ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return from_call(caught.value)

    @property
    def memory(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        (line,) = (line for line in status.splitlines() if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024


def generate_request(count: int, **fields: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT),
        stopping=pb.StoppingParams(max_tokens=count, ignore_eos=True),
        response=pb.ResponseOptions(token_ids=True, text=False),
    )
    request.MergeFrom(pb.GenerateRequest(**fields))
    return request


@asynccontextmanager
async def scripted(
    server: PrivateRedis, store: Store, *settings: str, pools: Sequence[tuple[str, wire.Role]] = BOTH
) -> AsyncIterator[Harness]:
    async with AsyncExitStack() as stack:
        workers = usable(await stack.enter_async_context(fleet(*pools)))
        running = await stack.enter_async_context(router(server, *settings))
        await become_ready(running)
        for worker in workers:  # not renewed: from then on the session counts
            await store.workers.register(worker.registration)
        await until(lambda: all(worker.hellos for worker in workers))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(running.address, NO_LIMITS))
        stub = InferenceServiceStub(channel)
        yield Harness(stub, channel, workers, running.address, running.process, running.admin_port)


async def read(call: Any) -> list[int]:
    ids: list[int] = []
    while (message := await call.read()) is not grpc.aio.EOF:
        ids += message.delta.token_ids
    if await call.code() is not grpc.StatusCode.OK:
        await call.wait_for_connection()  # raises what it ended with
    return ids
