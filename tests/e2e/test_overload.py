import asyncio

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.error_details import Reason
from decant.runtime.errors import from_call
from tests.e2e.client_checks import generate_request
from tests.e2e.deployment import PATIENCE_S

pytestmark = pytest.mark.slow

RUNNING, OUTPUT = 32, 64


def request(number: int, output: int) -> pb.GenerateRequest:
    message = generate_request([5 + (31 * number + n) % 4000 for n in range(40)], max_tokens=output)
    message.stopping.ignore_eos = True
    return message


async def refusal(stub: InferenceServiceStub, seconds: float) -> grpc.aio.AioRpcError | None:
    try:
        await stub.Generate(request(1000, 1500), timeout=seconds)
    except grpc.aio.AioRpcError as error:
        return error
    return None


async def test_a_request_that_cannot_end_in_time_is_refused_and_the_accepted_ones_complete(
    stub: InferenceServiceStub,
) -> None:
    await stub.Generate(request(0, OUTPUT), timeout=PATIENCE_S)
    running = [
        asyncio.ensure_future(stub.Generate(request(number, OUTPUT), timeout=PATIENCE_S))
        for number in range(1, RUNNING + 1)
    ]
    refused = None
    while refused is None or from_call(refused).reason is not Reason.QUEUE_FULL:
        assert not all(task.done() for task in running), "1,500 tokens in a second were promised while others ran"
        refused = await refusal(stub, 1.0)
    error = from_call(refused)
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after
    assert "for a deadline in" in str(error)
    for answer in await asyncio.gather(*running):
        assert answer.usage.completion_tokens == OUTPUT
