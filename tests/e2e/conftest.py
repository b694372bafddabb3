from collections.abc import AsyncIterator, Generator, Iterator

import pytest

from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import open_stub
from tests.e2e.deployment import SMALL_KV, STARTED, Deployment, deployment


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show what the processes of a failed test logged."""
    report = yield
    if report.failed:
        report.sections += [(f"log of {process.module} {process.pid}", process.warnings()) for process in list(STARTED)]
    return report


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
