"""`vllm.grpc.engine.VllmEngine` of real processes: what holds for requests of `decant.v1` holds for its requests."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.protos.vllm import vllm_engine_pb2_grpc
from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError, from_call
from tests.e2e.deployment import PATIENCE_S, Deployment, Worker, deployment

pytestmark = pytest.mark.slow

PROMPT = "def total(values):\n    result = 0\n" * 12
LONG = 600
SECRETS = {"acme": "correct horse", "umbrella": "battery staple"}
TENANTS = "".join(
    f'[tenants.{name}]\ntokens = ["{hashlib.sha256(secret.encode()).hexdigest()}"]\n{limit}\n'
    for (name, secret), limit in zip(SECRETS.items(), ("max_in_flight = 1", ""), strict=True)
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    tenants: Path = tmp_path_factory.mktemp("tenants") / "tenants.toml"
    tenants.write_text(TENANTS)
    with deployment(decode=2, router=("--credentials", str(tenants), "--resume-grace-ms", "0")) as made:
        yield made


@pytest.fixture
async def stub(running: Deployment) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(running.address) as channel:
        yield vllm_engine_pb2_grpc.VllmEngineStub(channel)


def generate(stub: Any, tenant: str = "umbrella", timeout: float = PATIENCE_S, **fields: Any) -> Any:
    sampling = vllm.SamplingParams(temperature=0, max_tokens=LONG, ignore_eos=True)
    request = vllm.GenerateRequest(**{"text": PROMPT, "stream": True, "sampling_params": sampling, **fields})
    return stub.Generate(request, timeout=timeout, metadata=(("authorization", f"Bearer {SECRETS[tenant]}"),))


async def error_of(call: Any) -> ServiceError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_call(error)
    raise AssertionError("the call succeeded")


async def owner(running: Deployment) -> Worker | None:
    for worker in running.workers[1:]:
        if (await asyncio.to_thread(worker.audit)).owners:
            return worker
    return None


async def test_a_quota_of_the_tenant_holds(stub: Any) -> None:
    first = generate(stub, "acme")
    await first.read()
    assert (await error_of(generate(stub, "acme"))).reason is Reason.QUOTA_EXCEEDED
    first.cancel()


async def test_a_deadline_ends_the_request_on_its_workers(stub: Any, running: Deployment) -> None:
    call = generate(stub, request_id="late", timeout=0.2)
    assert (await error_of(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.to_thread(running.settled)


async def test_an_abort_ends_the_request_on_its_workers(stub: Any, running: Deployment) -> None:
    call = generate(stub, request_id="aborted")
    await call.read()
    metadata = (("authorization", f"Bearer {SECRETS['umbrella']}"),)
    await stub.Abort(vllm.AbortRequest(request_ids=["aborted"]), metadata=metadata)
    assert (await error_of(call)).reason is Reason.CANCELLED
    await asyncio.to_thread(running.settled)


async def test_an_answer_outlives_the_decode_worker_that_writes_it(stub: Any, running: Deployment) -> None:
    (undisturbed,) = [message.complete async for message in generate(stub, stream=False)]
    assert len(undisturbed.output_ids) == LONG
    messages = []
    killed = None
    async for message in generate(stub):
        messages.append(message)
        if killed is None and len(messages) > 10:
            killed = await owner(running)
            if killed is not None:
                killed.process.kill()
                running.workers.remove(killed)
    assert killed is not None
    *chunks, last = messages
    assert [token for message in chunks for token in message.chunk.token_ids] == list(undisturbed.output_ids)
    assert last.complete.output_ids == undisturbed.output_ids
    assert last.complete.finish_reason == "length"
    await asyncio.to_thread(running.settled)
