import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.runtime.connections.channel import PEER_OPTIONS, Deadline, open_channel, remaining
from decant.runtime.connections.tls import PeerTls, ServerTls, channel_files, server_credentials
from decant.runtime.errors import DeadlineExceeded
from decant.runtime.grpc_options import NAME_OVERRIDE
from decant.runtime.serving.server_settings import ServerSettings, server_options
from decant.runtime.settings import InvalidSettings, SettingError
from decant.runtime.settings_sources import load
from tests.runtime.certificates import Certificates
from tests.runtime.harness import harness
from tests.worker.waiting import PATIENCE


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("others"))


async def version(channel: grpc.aio.Channel) -> str:
    async with channel:
        info = await inference_pb2_grpc.InferenceServiceStub(channel).GetServerInfo(
            pb.GetServerInfoRequest(), timeout=PATIENCE
        )
        return str(info.version)


async def refused(address: str, peer: PeerTls) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await version(open_channel(address, peer))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tls_authenticates_the_server(certificates: Certificates, others: Certificates) -> None:
    async with harness(tls_certificate=certificates.certificate, tls_key=certificates.key) as s:
        assert await version(open_channel(s.server.address, PeerTls(peer_ca=certificates.ca))) == "1"
        named = PeerTls(peer_ca=certificates.ca, peer_name="worker.decant")
        assert await version(open_channel(s.server.address, named)) == "1"
        await refused(s.server.address, PeerTls())
        await refused(s.server.address, PeerTls(peer_ca=others.ca))
        await refused(s.server.address, PeerTls(peer_ca=certificates.ca, peer_name="router.decant"))


async def test_mutual_tls_authenticates_the_client(certificates: Certificates, others: Certificates) -> None:
    ours = certificates
    async with harness(tls_certificate=ours.certificate, tls_key=ours.key, tls_client_ca=ours.ca) as s:
        whole = PeerTls(peer_ca=ours.ca, peer_certificate=ours.certificate, peer_key=ours.key)
        assert await version(open_channel(s.server.address, whole)) == "1"
        await refused(s.server.address, PeerTls(peer_ca=ours.ca))
        strange = PeerTls(peer_ca=ours.ca, peer_certificate=others.certificate, peer_key=others.key)
        await refused(s.server.address, strange)


class Rotating:
    def __init__(self, folder: Path, first: Certificates) -> None:
        folder.mkdir()
        self.tls: dict[str, Any] = {
            "tls_certificate": folder / "tls.crt",
            "tls_key": folder / "tls.key",
            "tls_client_ca": folder / "ca.crt",
        }
        self.replace(first)

    def replace(self, by: Certificates) -> None:
        contents = {"tls_certificate": by.certificate, "tls_key": by.key, "tls_client_ca": by.ca}
        for field, source in contents.items():
            new = self.tls[field].with_suffix(".new")
            new.write_bytes(source.read_bytes())
            new.rename(self.tls[field])


def peer_of(certificates: Certificates) -> PeerTls:
    return PeerTls(peer_ca=certificates.ca, peer_certificate=certificates.certificate, peer_key=certificates.key)


async def test_a_server_uses_replaced_tls_files_without_a_restart(
    certificates: Certificates, others: Certificates, tmp_path: Path
) -> None:
    files = Rotating(tmp_path / "tls", certificates)
    async with harness(peer=peer_of(certificates), **files.tls) as s:
        await s.inference.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)
        files.replace(others)
        assert await version(open_channel(s.server.address, peer_of(others))) == "1"
        await refused(s.server.address, peer_of(certificates))
        await s.inference.GetServerInfo(pb.GetServerInfoRequest(), timeout=PATIENCE)  # connected before the change


async def test_a_server_keeps_its_certificate_while_the_files_do_not_fit_together(
    certificates: Certificates, others: Certificates, tmp_path: Path
) -> None:
    files = Rotating(tmp_path / "tls", certificates)
    async with harness(**files.tls) as s:
        files.tls["tls_key"].write_bytes(others.key.read_bytes())
        assert await version(open_channel(s.server.address, peer_of(certificates))) == "1"
        files.tls["tls_certificate"].unlink()
        assert await version(open_channel(s.server.address, peer_of(certificates))) == "1"
        files.replace(others)
        assert await version(open_channel(s.server.address, peer_of(others))) == "1"


async def test_tls_files_that_can_not_be_used_are_refused_by_name(
    certificates: Certificates, others: Certificates, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    good = {"tls_certificate": certificates.certificate, "tls_key": certificates.key, "tls_client_ca": certificates.ca}
    bad: dict[str, Path] = {"tls_key": others.key, "tls_client_ca": empty, "tls_certificate": empty}
    for field, path in bad.items():
        with pytest.raises(SettingError) as caught:
            server_credentials(ServerTls(**{**good, field: path}))
        assert caught.value.field == ("tls_certificate" if field == "tls_key" else field)
    with pytest.raises(SettingError, match="peer_certificate"):
        channel_files(PeerTls(peer_ca=certificates.ca, peer_certificate=certificates.certificate, peer_key=others.key))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tls-certificate=a"], "--tls-certificate: needs tls_key"),
        (["--tls-key=a"], "--tls-key: needs tls_certificate"),
        (["--tls-client-ca=a"], "--tls-client-ca: needs tls_certificate"),
    ],
)
def test_a_certificate_without_its_key_is_refused(arguments: list[str], reason: str) -> None:
    with pytest.raises(InvalidSettings, match=reason):
        load(ServerSettings, arguments, {})


class Both(ServerSettings, PeerTls):
    """Settings of a process that serves and calls, like a worker."""


def test_a_peer_certificate_without_its_key_is_refused() -> None:
    for arguments, reason in (
        (["--tls-key=a"], "--tls-key: needs tls_certificate"),
        (["--peer-key=a", "--peer-ca=b"], "--peer-key: needs peer_certificate"),
        (["--peer-name=a"], "--peer-name: needs peer_ca"),
    ):
        with pytest.raises(InvalidSettings, match=reason):
            load(Both, arguments, {})


async def test_the_remaining_deadline_is_passed_to_the_next_call() -> None:
    seen: list[float | None] = []

    async def unary(request: Any, context: Any) -> Any:
        seen.append(remaining(context))
        if request.prompt:
            await asyncio.sleep(0.4)
            await s.inference.Generate(pb.GenerateRequest(), timeout=remaining(context))
        return pb.GenerateResponse()

    async with harness() as s:
        s.script.unary = unary
        await s.inference.Generate(pb.GenerateRequest(prompt="on"), timeout=9)
        await s.inference.Generate(pb.GenerateRequest())
    outer, inner, none = seen
    assert outer is not None
    assert inner is not None
    assert none is None
    assert 0 < inner < outer - 0.2


def test_a_deadline_is_passed_on_as_remaining_time() -> None:
    assert Deadline().remaining() is None
    assert not Deadline().has_passed
    assert Deadline.after(None) == Deadline()
    left = Deadline.after(10).remaining_ms()
    assert left is not None
    assert 9_000 < left <= 10_000
    assert Deadline.after(1e9).remaining_ms() == 2**32 - 1, "a message's uint32"
    over = Deadline.after(-1)
    assert (over.remaining(), over.remaining_ms(), over.has_passed) == (0.0, 0, True)
    Deadline.after(10).check()
    with pytest.raises(DeadlineExceeded):
        over.check()


def test_every_option_is_one_that_grpc_knows() -> None:
    library = Path(cygrpc.__file__).read_bytes()
    for name, _ in (*PEER_OPTIONS, *server_options(ServerSettings()), (NAME_OVERRIDE, "")):
        assert name.encode() in library, f"{name} would be passed over in silence"


def test_a_call_waits_in_grpc_for_longer_than_its_default_of_30_s() -> None:
    options = dict(server_options(ServerSettings()))
    assert options["grpc.server_max_unrequested_time_in_server"] > 3600


@pytest.mark.slow
async def test_pings_during_a_long_silence_do_not_end_the_connection() -> None:
    every = 7.0
    sent_away = asyncio.Event()

    async def unary(request: Any, context: Any) -> Any:
        await sent_away.wait()
        await asyncio.sleep(every + 1)
        return pb.GenerateResponse(request_id="answered")

    class Plain(inference_pb2_grpc.InferenceServiceServicer):
        async def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
            return await unary(request, context)

    pings = (
        *(o for o in PEER_OPTIONS if o[0] != "grpc.keepalive_time_ms"),
        ("grpc.keepalive_time_ms", int(every * 1000)),
    )
    plain = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(Plain(), plain)
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    try:
        async with harness(options=pings) as s, grpc.aio.insecure_channel(f"127.0.0.1:{port}", pings) as channel:
            s.script.unary = unary
            ours = s.inference.Generate(pb.GenerateRequest())
            with pytest.raises(grpc.aio.AioRpcError, match="ping"):
                await inference_pb2_grpc.InferenceServiceStub(channel).Generate(pb.GenerateRequest(), timeout=120)
            sent_away.set()
            assert (await ours).request_id == "answered"
    finally:
        await plain.stop(None)


async def test_a_server_that_is_slow_to_accept_a_connection_is_reached() -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            writer.write(data)
        writer.close()

    async with harness() as s:

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(0.4)
            there, back = await asyncio.open_connection("127.0.0.1", s.server.port)
            await asyncio.gather(relay(reader, back), relay(there, writer), return_exceptions=True)

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as slow:
            port = slow.sockets[0].getsockname()[1]
            assert await version(open_channel(f"127.0.0.1:{port}", PeerTls())) == "1"
