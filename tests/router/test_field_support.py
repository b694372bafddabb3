from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from decant.protos import inference_pb2 as pb
from decant.router.api.validation import UNIMPLEMENTED_FIELDS, validate
from decant.router.limits import (
    MAX_DETACH_TTL_MS,
)
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import Models
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument, NotFound, ServiceError, Unimplemented
from tests.router.factories import context_length, model, tiny, valid

Sampling, Stopping = pb.SamplingParams, pb.StoppingParams
DETACH = pb.StreamOptions.ON_DISCONNECT_DETACH


CHAT = ChatTemplate("{{ messages[0].role + messages[0].content }}x{{ add_generation_prompt }}", {})

VALUES: dict[str, list[Any]] = {"SamplingParams.logit_bias": [{3: 0.5}]}

READ_LATER = {"GenerateRequest.user", "GenerateRequest.parse_special_tokens", "GenerateRequest.lora_name"}
"""A valid request only carries them, or this model has no use of them; they are tested where they are read."""


def leaves(descriptor: Descriptor, chain: tuple[FieldDescriptor, ...] = ()) -> Iterator[tuple[FieldDescriptor, ...]]:
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield (*chain, field)
        else:
            yield from leaves(inner, (*chain, field))


FIELDS: list[Any] = list(leaves(pb.DESCRIPTOR.message_types_by_name["GenerateRequest"]))


def values(field: Any) -> list[Any]:
    name = f"{field.containing_type.name}.{field.name}"
    if name in VALUES:
        return VALUES[name]
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            some: list[Any] = ["x"]
        case FieldDescriptor.CPPTYPE_BOOL:
            some = [True, False]
        case FieldDescriptor.CPPTYPE_FLOAT:
            some = [0.5]
        case FieldDescriptor.CPPTYPE_ENUM:
            some = [value.number for value in field.enum_type.values]
        case _:
            some = [2]
    return [[value] for value in some] if field.is_repeated else some


def set_to(request: pb.GenerateRequest, chain: tuple[FieldDescriptor, ...], value: Any) -> pb.GenerateRequest:
    message: Any = request
    for field in chain[:-1]:
        message = getattr(message, field.name)
        message = message.add() if field.is_repeated else message
    name = chain[-1].name
    if chain[-1].is_repeated:
        kind = getattr(message, name)
        kind.update(value) if isinstance(value, dict) else kind.extend(value)
    else:
        setattr(message, name, value)
    return request


async def outcome(request: pb.GenerateRequest) -> Any:
    try:
        made = await validate(request, Models([model(chat=CHAT)]), context_length(None), Deadline(), "default")
    except ServiceError as error:
        return type(error), str(error)
    key = None if made.id_generated else made.key
    work = made.engine_request.SerializeToString(deterministic=True)
    return key, work, made.output_options, made.prompt_tokens, made.detach_ms, made.session


def plain() -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x = 1", sampling=Sampling(seed=7))


def name_of(chain: tuple[FieldDescriptor, ...]) -> str:
    return ".".join(field.name for field in chain)


@pytest.mark.slow
@pytest.mark.parametrize("chain", FIELDS, ids=name_of)
async def test_no_field_is_ignored(chain):
    name = f"{chain[-1].containing_type.name}.{chain[-1].name}"
    base = await outcome(plain())
    assert base == await outcome(plain())
    outcomes = [await outcome(set_to(plain(), chain, value)) for value in values(chain[-1])]
    if name in READ_LATER:
        assert outcomes == [base] * len(outcomes)
    else:
        assert any(other != base for other in outcomes)


@pytest.mark.parametrize("chain", FIELDS, ids=name_of)
async def test_refused_fields_are_exactly_the_listed_ones(chain):
    listed = {f"{field.containing_type.name}.{field.name}" for field in chain} & set(UNIMPLEMENTED_FIELDS)
    refused = set()
    for value in values(chain[-1]):
        try:
            await validate(
                set_to(plain(), chain, value), Models([model(chat=CHAT)]), context_length(None), Deadline(), "default"
            )
        except Unimplemented as error:
            refused.add(error.field)
        except InvalidArgument:
            continue
        except NotFound:
            assert name_of(chain) == "model"
    assert refused == listed


async def test_a_refusal_has_advice():
    chat = pb.GenerateRequest(messages=pb.Messages(messages=[pb.Message(role="user", content="hi")]))
    for request, message in (
        (chat, "tiny-python has no chat template: send a text"),
        (set_n(129), "sampling.n: 1 to 128, got 129"),
    ):
        with pytest.raises(ServiceError) as caught:
            await validate(request, Models([tiny()]), context_length(None), Deadline(), "default")
        assert str(caught.value) == message


def set_n(n: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt="x", sampling=pb.SamplingParams(n=n))


def test_the_list_names_fields_that_exist():
    for name in UNIMPLEMENTED_FIELDS:
        kind, _, field = name.partition(".")
        assert field in pb.DESCRIPTOR.message_types_by_name[kind].fields_by_name


@pytest.mark.parametrize("where", ["", "sampling", "stopping", "response", "cache", "stream", "token_ids"])
async def test_a_field_of_a_newer_build_is_refused(where):
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3]))
    inner: Any = getattr(request, where) if where else request
    inner.MergeFromString(b"\xa2\x06\x01x")  # field 100, a text
    with pytest.raises(Unimplemented, match="100"):
        await validate(request, Models([tiny()]), context_length(None), Deadline(), "default")


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": Sampling(n=1)},
        {"stopping": Stopping(include_stop_in_output=False)},
        {"response": pb.ResponseOptions(echo=False)},
        {"stream": pb.StreamOptions(on_disconnect=pb.StreamOptions.ON_DISCONNECT_CANCEL, min_chunk_tokens=1)},
        {"stream": pb.StreamOptions(on_disconnect=DETACH, detach_ttl_ms=MAX_DETACH_TTL_MS)},
    ],
)
async def test_a_field_set_to_what_is_done_anyway_is_honoured(fields):
    assert await valid(**fields)
