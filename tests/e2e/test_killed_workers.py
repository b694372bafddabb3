import asyncio

import pytest

from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import asked, decode_started, open_stub
from tests.e2e.deployment import PATIENCE_S, Deployment, Worker, deployment

pytestmark = pytest.mark.slow

PROMPT = "def total(values):\n    result = 0\n" * 12
TOKENS = 300


async def owner_of_a_run(running: Deployment) -> Worker | None:
    for worker in running.workers[1:]:
        audit = await asyncio.to_thread(worker.audit)
        if audit.owners:
            return worker
    return None


async def tokens(stub: InferenceServiceStub, running: Deployment | None = None) -> list[int]:
    """With ``running``, kills its decode worker after some of them."""
    request = asked(PROMPT, max_tokens=TOKENS)
    request.stopping.ignore_eos = True
    messages = []
    killed = None
    async for message in stub.GenerateStream(request, timeout=PATIENCE_S):
        messages.append(message)
        if running is not None and killed is None and message.seq > 10:
            killed = await owner_of_a_run(running)
            if killed is not None:
                killed.process.kill()
                running.workers.remove(killed)
    assert (killed is not None) == (running is not None)
    answer = decode_started(messages)
    assert answer.receipt.attempts == (1 if running is None else 2)
    return answer.ids


async def test_an_answer_outlives_the_decode_worker_that_writes_it() -> None:
    with deployment(decode=2) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            whole = await tokens(stub)
            assert len(whole) == TOKENS
            assert await tokens(stub, running) == whole
        await asyncio.to_thread(running.settled)
