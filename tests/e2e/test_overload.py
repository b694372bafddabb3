import asyncio

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError, from_call
from tests.e2e.client_checks import generate_request
from tests.e2e.deployment import PATIENCE_S

pytestmark = pytest.mark.slow

CALLERS, OUTPUT = 8, 200


def request(number: int, output: int) -> pb.GenerateRequest:
    message = generate_request([5 + (31 * number + n) % 4000 for n in range(40)], max_tokens=output)
    message.stopping.ignore_eos = True
    return message


async def keep_busy(stub: InferenceServiceStub, number: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        answer = await stub.Generate(request(number, OUTPUT), timeout=PATIENCE_S)
        assert answer.usage.completion_tokens == OUTPUT


async def refusal(stub: InferenceServiceStub) -> ServiceError:
    """Ask for 1,500 tokens in 200 ms until the router, which has to measure first, refuses at once."""
    while True:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(request(1000, 1500), timeout=0.2)
        error = from_call(failed.value)
        if error.reason is Reason.QUEUE_FULL:
            return error


async def test_a_request_that_cannot_end_in_time_is_refused_and_the_accepted_ones_complete(
    stub: InferenceServiceStub,
) -> None:
    stop = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as callers:
        for number in range(CALLERS):
            callers.create_task(keep_busy(stub, number, stop))
        error = await refusal(stub)
        stop.set()
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after
    assert "for a deadline in" in str(error)
