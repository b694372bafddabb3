from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from decant.decode_worker.main import DecodeSettings
from decant.protos import worker_pb2 as wire
from decant.runtime.connections import certificates
from decant.runtime.connections.certificates import ADMIN_NAME, PEER_NAME, PeerFiles
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.server import Server
from decant.runtime.serving.server_settings import is_every_address, is_loopback
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.worker.main import Worker
from tests.worker.fake_process import load as load_fake

PATIENCE_S = 300.0
INTERNAL = [method for service in wire.DESCRIPTOR.services_by_name.values() for method in service.methods]
OTHERS = list(health_pb2.DESCRIPTOR.services_by_name["Health"].methods)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> PeerFiles:
    return certificates.make(tmp_path_factory.mktemp("ours") / "tls")


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> PeerFiles:
    return certificates.make(tmp_path_factory.mktemp("strange") / "tls")


def peer_tls(roots: PeerFiles, own: PeerFiles | None) -> PeerTls:
    if own is None:
        return PeerTls(peer_ca=roots.ca, peer_name=PEER_NAME)
    return PeerTls(peer_ca=roots.ca, peer_certificate=own.certificate, peer_key=own.key, peer_name=PEER_NAME)


@asynccontextmanager
async def worker(files: PeerFiles, admin_name: str | None = None) -> AsyncIterator[tuple[Server, Worker]]:
    settings = DecodeSettings(
        model="any",
        port=0,
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_client_ca=files.ca,
        admin_name=admin_name,
        **dict(peer_tls(files, files)),
    )
    async with AsyncExitStack() as stack:
        one = Worker(settings, wire.ROLE_DECODE, load_fake, stack)
        server = Server(one.services(), settings, one.readiness, one.registry)
        await server.start()
        running = asyncio.create_task(server.run())
        yield server, one
        server.shutdown.request("the test ends")
        await running


async def call(channel: grpc.aio.Channel, method: MethodDescriptor) -> grpc.aio.AioRpcError | None:
    name = f"/{method.containing_service.full_name}/{method.name}"
    requests: Any = iter([b""]) if method.client_streaming else b""
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    answer = getattr(channel, kind)(name)(requests, timeout=PATIENCE_S)
    try:
        if not method.server_streaming:
            await answer
        else:
            await answer.read()
            answer.cancel()
    except grpc.aio.AioRpcError as error:
        return error
    return None


def served(one: Worker) -> float:
    """Count calls that reached a handler, which refused them because the worker is starting."""
    samples = (sample for metric in one.registry.collectors.collect() for sample in metric.samples)
    return sum(
        one.value for one in samples if one.name == "decant_errors_total" and one.labels["reason"] == "no_worker"
    )


async def test_every_method_is_closed_to_callers_that_are_not_authenticated(
    ours: PeerFiles, strange: PeerFiles
) -> None:
    callers = {
        "plaintext": PeerTls(),
        "no certificate": peer_tls(ours, None),
        "a certificate of another authority": peer_tls(ours, strange),
    }
    async with worker(ours) as (server, one):
        for caller, tls in callers.items():
            async with open_channel(server.address, tls) as channel:
                for method in (*INTERNAL, *OTHERS):
                    error = await call(channel, method)
                    assert error is not None, (caller, method.full_name)
                    assert error.code() is grpc.StatusCode.UNAVAILABLE, (caller, method.full_name, error)
        assert served(one) == 0
        async with open_channel(server.address, peer_tls(ours, ours)) as channel:
            for method in INTERNAL:
                error = await call(channel, method)
                assert error is not None
                assert error.details() == "this worker is starting"
            assert await call(channel, OTHERS[0]) is None
        assert served(one) == len(INTERNAL)


@pytest.mark.parametrize("name", [None, ADMIN_NAME])
async def test_administrators_have_a_role_of_their_own_where_the_worker_names_them(
    ours: PeerFiles, name: str | None
) -> None:
    admin = PeerTls(
        peer_ca=ours.ca, peer_certificate=ours.admin_certificate, peer_key=ours.admin_key, peer_name=PEER_NAME
    )
    administrative = wire.DESCRIPTOR.services_by_name["Admin"].methods
    async with worker(ours, name) as (server, _):
        for tls, is_admin in ((peer_tls(ours, ours), False), (admin, True)):
            async with open_channel(server.address, tls) as channel:
                for method in INTERNAL:
                    error = await call(channel, method)
                    assert error is not None
                    may = name is None or is_admin == (method in administrative)
                    expected = grpc.StatusCode.UNAVAILABLE if may else grpc.StatusCode.PERMISSION_DENIED
                    assert error.code() is expected, (method.full_name, is_admin, error)
                assert await call(channel, OTHERS[0]) is None, "health is open to both"


def test_administrators_need_certificates() -> None:
    with pytest.raises(InvalidSettings, match="needs tls_client_ca"):
        load(DecodeSettings, ["--model", "any", "--admin-name", ADMIN_NAME], {})


async def test_a_caller_rejects_a_worker_of_another_authority(ours: PeerFiles, strange: PeerFiles) -> None:
    async with worker(strange) as (server, one), open_channel(server.address, peer_tls(ours, ours)) as channel:
        for method in INTERNAL:
            error = await call(channel, method)
            assert error is not None
            assert error.details() != "this worker is starting"
        assert served(one) == 0


def test_certificates_are_private(tmp_path: Path) -> None:
    files = certificates.make(tmp_path / "tls")
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == {0o600}
    assert len(list((tmp_path / "tls").iterdir())) == 5
    private = {path for path in (tmp_path / "tls").iterdir() if b"PRIVATE" in path.read_bytes()}
    assert private == {files.key, files.admin_key}, "the authority's key is kept nowhere"
    with pytest.raises(FileExistsError):
        certificates.make(tmp_path / "tls")


EVERY = ("0.0.0.0", "::", "[::]")
LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")
BEYOND = (*EVERY, "10.1.2.3", "example.org", "localhost.example.org")


@pytest.mark.parametrize(
    ("host", "loopback"), [*((host, True) for host in LOOPBACK), *((host, False) for host in BEYOND)]
)
def test_without_credentials_a_worker_listens_on_loopback_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert is_every_address(host) is (host in EVERY)
    arguments = ["--model", "any", "--host", host]
    assert load(DecodeSettings, [*arguments, "--allow-unauthenticated-peers"], {}).is_open is not loopback
    if loopback:
        load(DecodeSettings, arguments, {})
        return
    with pytest.raises(InvalidSettings, match=r"--tls-client-ca.*--allow-unauthenticated-peers"):
        load(DecodeSettings, arguments, {})
    server_only = ["--tls-certificate", "a", "--tls-key", "b"]
    with pytest.raises(InvalidSettings, match="callers authenticate"):
        load(DecodeSettings, [*arguments, *server_only], {})


def test_a_worker_that_requires_certificates_needs_its_own() -> None:
    served = ["--tls-certificate", "a", "--tls-key", "b", "--tls-client-ca", "c"]
    with pytest.raises(InvalidSettings, match="--tls-client-ca: needs peer_ca, peer_certificate and peer_key"):
        load(DecodeSettings, ["--model", "any", *served], {})
