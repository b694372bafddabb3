from collections.abc import AsyncIterator, Iterator

import pytest

from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import open_stub
from tests.e2e.deployment import SMALL_KV, Deployment, deployment


@pytest.fixture(scope="package")
def pair() -> Iterator[Deployment]:
    worker = (*SMALL_KV, "--adapter-memory", str(64 << 20))  # so that a test can add adapters
    with deployment(router=("--resume-grace-ms", "0"), worker=worker) as running:
        yield running


@pytest.fixture
async def stub(pair: Deployment) -> AsyncIterator[InferenceServiceStub]:
    channel, made = open_stub(pair.address)
    async with channel:
        yield made
