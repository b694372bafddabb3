from __future__ import annotations

from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.router.api.validation import UNIMPLEMENTED_FIELDS
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import Models, ServedModel
from decant.runtime.error_details import Reason
from decant.runtime.errors import (
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from tests.router.factories import model, tiny
from tests.router.service_harness import (
    error_of_call,
    generate_request,
    harness,
)


async def test_tokens_go_there_and_back():
    async with harness() as s:
        made = await s.stub.Tokenize(pb.TokenizeRequest(text="x = 😀", return_tokens=True))
        assert made.count == len(made.token_ids) == len(made.tokens)
        assert (made.token_ids[0], made.tokens[0]) == (0, "<|begin|>")
        plain = await s.stub.Tokenize(pb.TokenizeRequest(text="x = 😀", add_special_tokens=False))
        assert list(plain.token_ids) == list(made.token_ids)[1:]
        assert not plain.tokens
        text = await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=made.token_ids))
        assert text.text == "x = 😀"
        request = pb.DetokenizeRequest(token_ids=made.token_ids, skip_special_tokens=False)
        assert (await s.stub.Detokenize(request)).text == "<|begin|>x = 😀"


async def test_text_beyond_the_context_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch):
    async def never(*_: Any, **__: Any) -> list[int]:
        raise AssertionError

    chat = model(id="chat", chat=ChatTemplate("{{ messages[0].content }}", {}))
    async with harness(Models([tiny(), chat])) as s:
        s.requests.context_length = 64
        monkeypatch.setattr(ServedModel, "encode", never)
        monkeypatch.setattr(ServedModel, "decode", never)
        text = "def f(x):\n" * 1000
        conversation = pb.Messages(messages=[pb.Message(role="user", content=text)])
        calls = {
            "prompt": s.stub.Generate(generate_request(prompt=text)),
            "messages": s.stub.Generate(pb.GenerateRequest(model="chat", messages=conversation)),
            "text": s.stub.Tokenize(pb.TokenizeRequest(text=text)),
        }
        for field, sent in calls.items():
            error = await error_of_call(sent)
            assert isinstance(error, InvalidArgument)
            assert (error.field, error.reason) == (field, Reason.PROMPT_TOO_LONG)
            assert "64" in error.limit
            assert error.value.startswith("at least ")
        error = await error_of_call(s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5] * 65)))
        assert isinstance(error, InvalidArgument)
        assert (error.field, error.value) == ("token_ids", "65")


async def test_tokenize_and_detokenize_count_as_calls_of_the_tenant():
    async with harness() as s:
        await s.stub.Tokenize(pb.TokenizeRequest(text="x"))
        await s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]))
        assert s.requests.quota_tenants == ["default", "default"]


async def test_a_conversation_is_tokenized_as_its_model_writes_it():
    chat = model(id="chat", chat=ChatTemplate("{{ first }}{{ messages[0].content }}", {"first": "x"}))
    async with harness(Models([tiny(), chat])) as s:
        messages = pb.Messages(messages=[pb.Message(role="user", content="x = 1")])
        made = await s.stub.Tokenize(pb.TokenizeRequest(model="chat", messages=messages))
        plain = pb.TokenizeRequest(text="xx = 1", add_special_tokens=False)
        assert made.token_ids == (await s.stub.Tokenize(plain)).token_ids


async def test_text_that_can_not_be_tokenized_is_refused():
    async with harness() as s:
        messages = pb.Messages(messages=[pb.Message(role="user", content="x")])
        assert isinstance(await error_of_call(s.stub.Tokenize(pb.TokenizeRequest())), InvalidArgument)
        error = await error_of_call(s.stub.Tokenize(pb.TokenizeRequest(messages=messages)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "messages"
        error = await error_of_call(s.stub.Tokenize(pb.TokenizeRequest(messages=messages, add_special_tokens=False)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "add_special_tokens"
        assert isinstance(await error_of_call(s.stub.Tokenize(pb.TokenizeRequest(model="no", text="x"))), NotFound)
        assert isinstance(
            await error_of_call(s.stub.Detokenize(pb.DetokenizeRequest(token_ids=[4096]))), InvalidArgument
        )


@pytest.mark.parametrize("method", ["ListModels", "GetModel", "GetServerInfo"])
async def test_unknown_fields_are_refused_by_number_in_every_call(method: str):
    newer: dict[str, Any] = {
        "ListModels": pb.ListModelsRequest,
        "GetModel": pb.GetModelRequest,
        "GetServerInfo": pb.GetServerInfoRequest,
    }
    async with harness() as s:
        request = newer[method].FromString(b"\xc0\x3e\x01")  # field 1000
        error = await error_of_call(getattr(s.stub, method)(request))
        assert isinstance(error, Unimplemented)
        assert error.field.endswith(".1000")


async def test_list_models_and_get_model_describe_the_served_models():
    async with harness(Models([tiny(), model(id="open", max_context_length=None)])) as s:
        listed = (await s.stub.ListModels(pb.ListModelsRequest())).models
        assert [found.id for found in listed] == ["tiny-python", "open"]
        assert listed[0] == await s.stub.GetModel(pb.GetModelRequest())
        assert (listed[0].max_context_length, listed[0].max_output_tokens) == (2048, 2047)
        assert (listed[0].vocab_size, list(listed[0].eos_token_ids)) == (4096, [1])
        assert (listed[1].max_context_length, listed[1].max_output_tokens) == (0, 0)
        assert listed[0].quantization == "int4"
        s.requests.context_length = 512
        assert (await s.stub.GetModel(pb.GetModelRequest(model="open"))).max_context_length == 512
        assert (await s.stub.GetModel(pb.GetModelRequest(model="tiny-python"))).max_context_length == 512
        assert isinstance(await error_of_call(s.stub.GetModel(pb.GetModelRequest(model="no"))), NotFound)


async def test_server_info_has_limits_and_unimplemented_fields():
    async with harness() as s:
        info = await s.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert (info.version, info.router_id, info.default_model) == ("1.2.3", "router-a", "tiny-python")
        assert tuple(info.unimplemented_fields) == UNIMPLEMENTED_FIELDS
        assert info.limits.max_queued_requests == 8
        assert (info.state_store_available, info.draining) == (True, False)
