"""What administrators see of a router, and its other callers do not."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from decant.command import requests as listing
from decant.command.deployment.deployments import Deployment, DeploymentRecord
from decant.command.requests import RouterRequests
from decant.command.status import new_console
from decant.protos import inference_pb2 as pb
from decant.protos import router_admin_pb2 as wire
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.protos.router_admin_pb2_grpc import RouterAdminStub
from decant.protos.state_pb2 import RouterRegistration
from decant.router.administration import RouterAdminService
from decant.router.api import auth
from decant.router.execution.request_list import list_requests
from decant.router.main import RouterProcess
from decant.router.settings import RouterSettings
from decant.router.text.served_model import Models
from decant.runtime.connections import certificates
from decant.runtime.connections.certificates import ADMIN_NAME, PEER_NAME, PeerFiles
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.peer import new_peer
from decant.runtime.connections.tls import PeerTls
from decant.runtime.serving.health import Readiness
from decant.runtime.serving.server import Server
from decant.runtime.serving.server_settings import ServerSettings
from decant.runtime.settings import InvalidSettings
from decant.runtime.settings_sources import load
from decant.runtime.telemetry.metrics import Registry
from decant.state.private_redis import PrivateRedis
from decant.state.store import Store
from tests.decant.fake_workers import run
from tests.router.factories import tiny
from tests.router.fake_worker import fleet
from tests.router.harness import PATIENCE, Core, D, P, begin_paused, core, make_request
from tests.router.service_harness import make_service


@pytest.fixture
def files(tmp_path: Path) -> PeerFiles:
    return certificates.make(tmp_path / "tls")


def mutual_tls(files: PeerFiles) -> dict[str, Any]:
    return {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.ca}


def peer(files: PeerFiles) -> PeerTls:
    return PeerTls(peer_ca=files.ca, peer_certificate=files.certificate, peer_key=files.key, peer_name=PEER_NAME)


def administrator(files: PeerFiles) -> PeerTls:
    return PeerTls(
        peer_ca=files.ca, peer_certificate=files.admin_certificate, peer_key=files.admin_key, peer_name=PEER_NAME
    )


@asynccontextmanager
async def serving(router: Core, admin_name: str | None = ADMIN_NAME, **tls: Any) -> AsyncIterator[str]:
    loop, registry = asyncio.get_running_loop(), Registry(process=False)
    services = [make_service(router.requests, registry).service()]
    if admin_name is not None:
        executions = router.requests.executions.open
        services.append(RouterAdminService(lambda: list_requests(executions.values(), loop.time())).service())
    settings = ServerSettings(port=0, drain_seconds=1.0, admin_name=admin_name, **tls)
    server = Server(services, settings, Readiness(), registry)
    await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server.address
    finally:
        server.shutdown.request("the test ends")
        server.shutdown.request("the test ends")
        await asyncio.wait([task])


async def refusal(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code()


async def test_administrators_list_requests_and_other_callers_do_not(
    store: Store, server: PrivateRedis, files: PeerFiles
) -> None:
    tls = mutual_tls(files)
    async with fleet(P, D) as workers, core(store, workers) as router, serving(router, **tls) as address:
        stream = await begin_paused(router, workers[1], 2, request=make_request("r-1"))
        await store.routers.register(RouterRegistration(peer=new_peer("router-1"), address=address))
        async with open_channel(address, peer(files)) as channel:
            call = RouterAdminStub(channel).ListRequests(wire.ListRequestsRequest(), timeout=PATIENCE)
            assert await refusal(call) is grpc.StatusCode.PERMISSION_DENIED
            await InferenceServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)
        async with open_channel(address, administrator(files)) as channel:
            call = InferenceServiceStub(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)
            assert await refusal(call) is grpc.StatusCode.PERMISSION_DENIED
        shown = await asyncio.to_thread(list_by_command, server.url, files)
        (one,) = shown["routers"]
        (request,) = one["requests"]
        assert (one["id"], one["total"], one["error"]) == ("router-1", 1, "")
        assert (request["id"], request["tenant"], request["state"]) == ("r-1", "default", "decoding")
        assert (request["output_tokens"], request["decode_worker"]) == (stream.num_tokens, "d")
        assert "prompt" not in request
        workers[1].go.set()


def list_by_command(url: str, files: PeerFiles) -> Any:
    tls = ("--ca", str(files.ca), "--certificate", str(files.admin_certificate), "--key", str(files.admin_key))
    done = run("requests", "--json", "--redis-url", url, *tls, "--server-name", PEER_NAME)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("admin_name", [None, ADMIN_NAME])
async def test_a_router_serves_the_calls_of_administrators_only_where_it_names_them(
    store: Store, files: PeerFiles, admin_name: str | None
) -> None:
    settings = RouterSettings(models=("m",), port=0, admin_name=admin_name, **mutual_tls(files))
    models = Models([tiny()])
    process = RouterProcess(settings, models, auth.load(None, models), store)
    (*others, last) = process.services
    assert not any(service.is_administrative for service in others)
    assert (last.name == "decant.internal.v1.RouterAdmin", last.is_administrative) == (admin_name is not None,) * 2
    await process.close()


def test_administrators_of_a_router_need_certificates() -> None:
    with pytest.raises(InvalidSettings, match="needs tls_client_ca"):
        load(RouterSettings, ["--models", "m", "--admin-name", ADMIN_NAME], {})


async def test_the_command_reports_a_router_that_names_no_administrators(store: Store, server: PrivateRedis) -> None:
    none = await asyncio.to_thread(run, "requests", "--redis-url", server.url)
    assert (none.exit_code, none.stderr) == (2, "decant: no router is registered: there are no requests to list\n")
    async with core(store, ()) as router, serving(router, None) as address:
        await store.routers.register(RouterRegistration(peer=new_peer("router-1"), address=address))
        done = await asyncio.to_thread(run, "requests", "--redis-url", server.url)
    assert done.exit_code == 1
    assert done.stdout == f"router-1: {address}: it names no administrators: set --admin-name\n"


async def test_the_command_does_not_call_the_routers_of_this_machine_with_the_tls_of_their_workers(
    store: Store, server: PrivateRedis, files: PeerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    peers: dict[str, str | None] = {"ca": str(files.ca), "certificate": str(files.certificate), "key": str(files.key)}
    peers["name"] = PEER_NAME
    async with core(store, ()) as router, serving(router, None) as address:
        await store.routers.register(RouterRegistration(peer=new_peer("router-1"), address=address))
        with DeploymentRecord() as record:
            record.write(Deployment(os.getpid(), (address,), server.url, peers))
            for options in ((), ("--redis-url", server.url)):
                done = await asyncio.to_thread(run, "requests", *options)
                assert done.stdout == f"router-1: {address}: it names no administrators: set --admin-name\n"


def test_an_id_that_a_client_chose_is_no_markup_and_no_control_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    requests = [wire.OpenRequest(id=id) for id in ("[/x]", "[bold]b", "a\x1b[31mb\nc")]
    listing.show([RouterRequests("router-1", wire.ListRequestsResponse(total=3, requests=requests))], new_console())
    header, *rows, count = capsys.readouterr().out.splitlines()
    assert [row.split()[-1] for row in rows] == [
        "[/x]",
        "[bold]b",
        "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c",
    ]
    assert (header.split()[-1], count) == ("id", "router-1: 3 in flight")


@pytest.mark.parametrize("kind", [x509.DNSName, x509.RFC822Name, x509.UniformResourceIdentifier])
async def test_an_administrators_name_is_a_dns_name(store: Store, files: PeerFiles, tmp_path: Path, kind: Any) -> None:
    """An authority of clients may sign any address of mail, or any URI."""
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "client")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(own, own, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([kind(ADMIN_NAME)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    client = PeerTls(
        peer_ca=files.ca,
        peer_certificate=_written(tmp_path / "client.crt", certificate.public_bytes(Encoding.PEM)),
        peer_key=_written(
            tmp_path / "client.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        ),
        peer_name=PEER_NAME,
    )
    tls = {**mutual_tls(files), "tls_client_ca": client.peer_certificate}
    async with core(store, ()) as router, serving(router, **tls) as address, open_channel(address, client) as channel:
        call = RouterAdminStub(channel).ListRequests(wire.ListRequestsRequest(), timeout=PATIENCE)
        if kind is x509.DNSName:
            await call
        else:
            assert await refusal(call) is grpc.StatusCode.PERMISSION_DENIED


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
