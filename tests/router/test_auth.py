from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from decant.protos import inference_pb2 as pb
from decant.router.api.auth import DEFAULT_TENANT, Authenticator, load
from decant.router.text.served_model import Models
from decant.runtime.errors import NotFound, PermissionDenied, Unauthenticated
from decant.runtime.settings import InvalidSettings
from decant.state.quota import TenantLimits
from tests.router.factories import AT_LENGTH, model, tiny, write
from tests.router.service_harness import all_of, error_of_call, generate_request, harness

SECRET = "correct horse"
OTHER = "battery staple"
METHODS = pb.DESCRIPTOR.services_by_name["InferenceService"].methods_by_name
MODELS = Models([tiny(), model(id="second")])
CANCEL = pb.CancelGenerationResponse


def digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def bearer(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


TWO = f"""
[tenants.acme]
tokens = ["{digest(SECRET)}", "{digest("its next one")}"]
models = ["second"]
max_in_flight = 3

[tenants.umbrella]
tokens = ["{digest(OTHER)}"]
"""


@pytest.fixture
def callers(tmp_path: Path) -> Authenticator:
    return loaded(tmp_path, TWO)


def loaded(folder: Path, text: str) -> Authenticator:
    path = folder / "tenants.toml"
    path.write_text(text)
    return load(path, MODELS)


def test_a_secret_names_its_tenant(callers: Authenticator) -> None:
    tenants = [callers.tenant_of(bearer(secret)) for secret in (SECRET, "its next one", OTHER)]
    assert [tenant.name for tenant in tenants] == ["acme", "acme", "umbrella"]
    assert callers.tenant_of([("user-agent", "x"), ("authorization", f"bearer {SECRET}")]).name == "acme"
    assert callers.limits == {"acme": TenantLimits(in_flight=3)}, "a tenant without limits costs nothing"


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", SECRET),),
        (("authorization", f"Basic {SECRET}"),),
        (("authorization", b"Bearer"),),
        (("x-token", f"Bearer {SECRET}"),),
        bearer(""),
        bearer("correct hors"),
        bearer(f"{SECRET} "),
        bearer(digest(SECRET)),
        (*bearer(SECRET), *bearer(OTHER)),
        (*bearer("wrong"), *bearer(SECRET)),
    ],
)
def test_all_wrong_credentials_get_the_same_error(callers: Authenticator, metadata: Any) -> None:
    with pytest.raises(Unauthenticated) as refusal:
        callers.tenant_of(metadata)
    assert refusal.value.detail == Unauthenticated().detail


def test_without_a_file_every_caller_is_allowed() -> None:
    callers = load(None, MODELS)
    tenant = callers.tenant_of(())
    assert (tenant.name, tenant.models, callers.limits) == (DEFAULT_TENANT, MODELS, {})


def test_a_model_of_others_is_known_and_refused(callers: Authenticator) -> None:
    mine, all_models = (callers.tenant_of(bearer(secret)).models for secret in (SECRET, OTHER))
    assert (mine.find("").id, mine.find("second").id, list(mine.by_id)) == ("second", "second", ["second"])
    with pytest.raises(PermissionDenied):
        mine.find("tiny-python")
    with pytest.raises(NotFound):
        mine.find("nobody")
    assert all_models is MODELS


ENTRY = f'[tenants.a]\ntokens = ["{digest("a")}"]\n'


@pytest.mark.parametrize(
    ("text", "key", "limit", "value"),
    [
        ("", "tenants", "is needed", ""),
        ("tenants = {}", "tenants", "at least 1", ""),
        ("tenants = 'Hush!'", "tenants", "dictionary", ""),
        ("[tenants.a]", "tenants.a.tokens", "is needed", ""),
        ("[tenants.a]\ntokens = []", "tenants.a.tokens", "at least 1", ""),
        ("[tenants.a]\ntokens = 'Hush!'", "tenants.a.tokens", "list", ""),
        ("[tenants.a]\ntokens = ['Hush!']", "tenants.a.tokens.0", "64 hexadecimal digits", ""),
        (ENTRY.replace(digest("a"), digest("a").upper()), "tenants.a.tokens.0", "lower case", ""),
        (ENTRY + "token = 'Hush!'", "tenants.a.token", "no such key", ""),
        ("Hush = 1\n" + ENTRY, "Hush", "no such key", ""),
        (ENTRY + "models = []", "tenants.a.models", "at least 1", "[]"),
        (ENTRY + "models = ['nobody']", "tenants.a.models", "tiny-python, second", "nobody"),
        (ENTRY + "max_in_flight = 0", "tenants.a.max_in_flight", "greater than or equal to 1", "0"),
        (ENTRY + "max_in_flight = true", "tenants.a.max_in_flight", "integer", "True"),
        (ENTRY + "tokens_per_minute = '9'", "tenants.a.tokens_per_minute", "integer", "9"),
        (ENTRY + f"[tenants.b]\ntokens = ['{digest('a')}']", "tenants.b.tokens.0", "a has it", ""),
    ],
)
def test_a_file_is_refused_by_key_limit_and_value(tmp_path: Path, text: str, key: str, limit: str, value: str) -> None:
    with pytest.raises(InvalidSettings) as refusal:
        loaded(tmp_path, text)
    (violation,) = refusal.value.violations
    assert violation.field == f"{tmp_path / 'tenants.toml'}: {key}"
    assert limit in violation.limit
    assert violation.value == value
    assert "Hush!" not in str(refusal.value)


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="readable TOML"):
        loaded(tmp_path, "[tenants")
    with pytest.raises(InvalidSettings, match="readable TOML"):
        load(tmp_path / "nowhere", MODELS)


@pytest.mark.rule("authenticated-first", "router/api/auth.py:authenticated")
@pytest.mark.parametrize("method", list(METHODS.values()), ids=list(METHODS))
async def test_every_method_is_authenticated(callers: Authenticator, method: Any) -> None:
    async with harness(MODELS, callers) as s:
        request = getattr(pb, method.input_type.name)()
        for metadata in (None, bearer("wrong")):
            call = getattr(s.stub, method.name)(request, metadata=metadata)
            error = await error_of_call(call.read() if method.server_streaming else call)
            assert isinstance(error, Unauthenticated)
        assert s.requests.streams.empty()


async def test_tenants_see_only_the_models_they_may_use(callers: Authenticator) -> None:
    async with harness(MODELS, callers) as s:
        mine, others = bearer(SECRET), bearer(OTHER)
        listed = await s.stub.ListModels(pb.ListModelsRequest(), metadata=mine)
        assert [found.id for found in listed.models] == ["second"]
        listed = await s.stub.ListModels(pb.ListModelsRequest(), metadata=others)
        assert [found.id for found in listed.models] == ["tiny-python", "second"]
        assert (await s.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=mine)).default_model == "second"
        assert (await s.stub.GetModel(pb.GetModelRequest(), metadata=mine)).id == "second"
        for call in (
            s.stub.Generate(generate_request(model="tiny-python"), metadata=mine),
            s.stub.GenerateStream(generate_request(model="tiny-python"), metadata=mine).read(),
            s.stub.Tokenize(pb.TokenizeRequest(model="tiny-python", text="x"), metadata=mine),
            s.stub.Detokenize(pb.DetokenizeRequest(model="tiny-python", token_ids=[5]), metadata=mine),
            s.stub.GetModel(pb.GetModelRequest(model="tiny-python"), metadata=mine),
        ):
            assert isinstance(await error_of_call(call), PermissionDenied)
        assert (await s.stub.GetModel(pb.GetModelRequest(model="tiny-python"), metadata=others)).id == "tiny-python"


async def test_tenants_see_their_own_requests_alone(callers: Authenticator) -> None:
    async with harness(MODELS, callers) as s:
        mine, others = bearer(SECRET), bearer(OTHER)
        named = {"request_id": "same", "cache": pb.CacheOptions(session_id="one")}
        call = s.stub.GenerateStream(generate_request(**named), metadata=mine)
        stream = await s.stream()
        assert isinstance(
            await error_of_call(s.stub.GetGeneration(pb.GetGenerationRequest(request_id="same"), metadata=others)),
            NotFound,
        )
        assert isinstance(
            await error_of_call(s.stub.ResumeStream(pb.ResumeStreamRequest(request_id="same"), metadata=others).read()),
            NotFound,
        )
        cancel = pb.CancelGenerationRequest(request_id="same")
        assert (await s.stub.CancelGeneration(cancel, metadata=others)).status == CANCEL.STATUS_UNKNOWN_REQUEST
        theirs = s.stub.GenerateStream(generate_request(**named, model="second"), metadata=others)
        another = await s.stream()
        assert another.request.engine_request.model == stream.request.engine_request.model
        assert another.request.engine_request.salt != stream.request.engine_request.salt, "their blocks are not shared"
        assert another.request.session != stream.request.session
        write(stream, 5, end=AT_LENGTH)
        write(another, 6, 7, end=AT_LENGTH)
        assert [(await all_of(one))[-1].usage.completion_tokens for one in (call, theirs)] == [1, 2]


async def test_no_log_line_has_a_secret(callers: Authenticator) -> None:
    async with harness(MODELS, callers) as s:
        with capture_logs() as lines:
            await error_of_call(s.stub.Generate(generate_request(), metadata=bearer("not so secret")))
            s.requests.plan = lambda stream: write(stream, 5, end=AT_LENGTH)
            await s.stub.Generate(generate_request(), metadata=bearer(SECRET))
        assert [line["tenant"] for line in lines if line["event"] == "request ended"] == ["acme"]
        assert "secret" not in str(lines)
        assert SECRET not in str(lines)
        assert digest(SECRET) not in str(lines)


async def test_reflection_and_health_need_nothing(callers: Authenticator) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with harness(MODELS, callers) as s, grpc.aio.insecure_channel(s.server.address) as channel:
        found = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert found.status in (health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING)
