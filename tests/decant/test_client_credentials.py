from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import decant
from decant import AsyncClient, Client
from decant.protos import inference_pb2 as pb
from tests.decant.scripted import Script
from tests.runtime.certificates import Certificates
from tests.runtime.harness import harness


def test_tls_needs_certificate_and_key_together() -> None:
    with pytest.raises(ValueError, match="come together"):
        decant.Tls(certificate="c.pem")
    with pytest.raises(FileNotFoundError):
        Client("localhost:1", tls=decant.Tls(ca="nowhere.pem"))


async def test_mutual_tls_connects_and_the_error_names_a_missing_certificate(tmp_path: Path) -> None:
    ours = Certificates(tmp_path)
    mutual: dict[str, Any] = {"tls_certificate": ours.certificate, "tls_key": ours.key, "tls_client_ca": ours.ca}
    async with harness(**mutual) as served:
        address = served.server.address
        tls = decant.Tls(ca=ours.ca, certificate=ours.certificate, key=ours.key, name="worker.decant")
        async with AsyncClient(address, tls=tls) as client:
            assert (await client.server_info()).version == "1"
        with Client(address, tls=tls) as blocking:
            assert (await asyncio.to_thread(blocking.server_info)).version == "1"
        for wrong, advice in (
            (None, "it may speak TLS, which tls=Tls(ca=...) (--ca) turns on"),
            (decant.Tls(ca=ours.ca), "it may ask for Tls(certificate=..., key=...) (--certificate, --key)"),
        ):
            async with AsyncClient(address, tls=wrong, resume_seconds=0) as client:
                with pytest.raises(decant.Unavailable) as caught:
                    await client.server_info()
            assert str(caught.value) == f"no connection to {address}: it closed the connection: {advice}"


@pytest.mark.slow
async def test_a_tls_mismatch_is_named_in_the_error(tmp_path: Path, address: str) -> None:
    ours = Certificates(tmp_path)
    async with harness(tls_certificate=ours.certificate, tls_key=ours.key) as served:
        for where, tls, advice in (
            (served.server.address, decant.Tls(ca=ours.ca, name="other"), "give it as Tls(name=...)"),
            (served.server.address, decant.Tls(), "does not chain to the roots of tls="),
            (address, decant.Tls(ca=ours.ca), "it uses plaintext: leave out tls= (--ca)"),
            ("127.0.0.1:1", None, "Connection refused"),
        ):
            resume_seconds = 0.0 if tls is None else LASTING_S  # settings that never fit are not tried for so long
            async with AsyncClient(where, tls=tls, call_seconds=LASTING_S, resume_seconds=resume_seconds) as client:
                with pytest.raises(decant.Unavailable) as caught:
                    await client.server_info()
            assert str(caught.value).startswith(f"no connection to {where}: ")
            assert advice in str(caught.value)


LASTING_S = 3600.0

TOKEN = "s3cret-of-acme"


CALLS: dict[str, Callable[[Any], Any]] = {
    "Generate": lambda client: client.generate("x"),
    "GenerateStream": lambda client: client.stream("x"),
    "ResumeStream": lambda client: client.resume("r"),
    "GetGeneration": lambda client: client.generation("r"),
    "CancelGeneration": lambda client: client.cancel("r"),
    "Score": lambda client: client.score("x", ["y"]),
    "Embed": lambda client: client.embed("x"),
    "Tokenize": lambda client: client.tokenize("x"),
    "Detokenize": lambda client: client.detokenize([5]),
    "ListModels": lambda client: client.models(),
    "GetModel": lambda client: client.model(),
    "GetServerInfo": lambda client: client.server_info(),
}


@pytest.mark.parametrize("token", [TOKEN, None])
def test_every_call_sends_the_token(script: Script, address: str, token: str | None) -> None:
    script.known["r"] = pb.GenerateRequest(request_id="r")
    with Client(address, token=token) as client:
        for call in CALLS.values():
            found = call(client)
            if isinstance(found, decant.Stream):
                assert [delta.text for delta in found] == ["a", "b", "c"]
    brought = [f"Bearer {token}"] if token else []
    ours = [call for call in script.authorized if call[0] in CALLS]
    assert ours == [(method, brought) for method in CALLS]


async def test_every_async_call_sends_the_token(script: Script, address: str) -> None:
    script.known["r"] = pb.GenerateRequest(request_id="r")
    async with AsyncClient(address, token=TOKEN) as client:
        for call in CALLS.values():
            found = call(client)
            if isinstance(found, decant.AsyncStream):
                assert [delta.text async for delta in found] == ["a", "b", "c"]
            else:
                await found
    ours = [call for call in script.authorized if call[0] in CALLS]
    assert ours == [(method, [f"Bearer {TOKEN}"]) for method in CALLS]


def test_every_method_of_the_service_is_covered() -> None:
    assert set(CALLS) == set(pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name)


async def test_tenants_share_the_connections_of_a_client_which_closes_them_all(script: Script, address: str) -> None:
    first, second = Client(address, token="first"), AsyncClient(address)
    other, another = first.with_token("other"), second.with_token("another")
    for client in (first, other, first):
        client.server_info()
    await another.server_info()
    await second.server_info()
    brought = [secrets for method, secrets in script.authorized if method == "GetServerInfo"]
    assert brought == [["Bearer first"], ["Bearer other"], ["Bearer first"], ["Bearer another"], []]
    first.close()
    await second.close()
    with pytest.raises(decant.Cancelled):
        other.server_info()
    with pytest.raises(decant.Cancelled):
        await another.server_info()
    with pytest.raises(ValueError, match="token: printable ASCII"):
        first.with_token("two words")


@pytest.mark.parametrize("token", ["", "two words", "s3cret\n", "s\u00e9cret"])
def test_an_unsendable_token_is_refused_and_not_shown(token: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match="token: printable ASCII") as refusal:
            kind("127.0.0.1:1", token=token)
        assert not token or token not in str(refusal.value)


def test_a_token_appears_in_no_error_and_no_repr(script: Script, address: str) -> None:
    script.refusal = decant.PermissionDenied("model x")
    with Client(address, token=TOKEN) as client:
        shown = [repr(client), repr(client._routers), str(vars(client))]
        with pytest.raises(decant.PermissionDenied) as refusal:
            client.generate("x")
    assert TOKEN not in " ".join([*shown, str(refusal.value), repr(refusal.value)])
