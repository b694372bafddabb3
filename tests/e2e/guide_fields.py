"""Checks of the fields of guided output."""

from __future__ import annotations

import json
import re
from typing import Any

import grpc
import pytest

from decant.protos import inference_pb2 as pb
from tests.e2e.deployment import PATIENCE_S
from tests.e2e.field_checks import Stub, field, request


@field("GuidedDecoding.json_schema")
async def _json_schema(stub: Stub) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    answer = await guided(stub, json_schema=json.dumps(schema))
    assert json.loads(answer.text) == {"a": 7}
    with pytest.raises(grpc.aio.AioRpcError, match="uniqueItems at #/items"):
        await guided(stub, json_schema='{"items": {"uniqueItems": true}}')


@field("GuidedDecoding.json_object")
async def _json_object(stub: Stub) -> None:
    call = stub.Generate(request(guided=pb.GuidedDecoding(json_object=True)), timeout=PATIENCE_S)
    assert (await call).outputs[0].text.startswith("{")


@field("GuidedDecoding.regex")
async def _regex(stub: Stub) -> None:
    assert re.fullmatch("[ab]{3}(x|yz)", (await guided(stub, regex="[ab]{3}(x|yz)")).text)


@field("GuidedDecoding.structural_tag")
async def _structural_tag(stub: Stub) -> None:
    tags = {"structures": [{"begin": "(", "schema": {"enum": [1, 2]}, "end": ")"}], "triggers": ["("]}
    made = request(
        guided=pb.GuidedDecoding(structural_tag=json.dumps(tags)), stopping=pb.StoppingParams(max_tokens=200)
    )
    text = (await stub.Generate(made, timeout=PATIENCE_S)).outputs[0].text
    assert "(" in text
    assert all(part.startswith(("1)", "2)")) for part in text.split("(")[1:-1])


@field("GuidedDecoding.ebnf_grammar")
async def _ebnf_grammar(stub: Stub) -> None:
    grammar = 'start: "(" start ")" | NUMBER\nNUMBER: /[0-9]{1,2}/\n'
    assert re.fullmatch(r"\(*\d{1,2}\)*", (await guided(stub, ebnf_grammar=grammar)).text)


@field("Choices.choices")
async def _choices(stub: Stub) -> None:
    assert (await guided(stub, choice=pb.Choices(choices=["maybe", "never"]))).text in ("maybe", "never")


async def guided(stub: Stub, **guide: Any) -> Any:
    """Output that matches a guide."""
    made = request(guided=pb.GuidedDecoding(**guide), stopping=pb.StoppingParams(max_tokens=200))
    (output,) = (await stub.Generate(made, timeout=PATIENCE_S)).outputs
    assert output.finished.finish_reason == pb.FINISH_REASON_STOP
    assert output.finished.HasField("eos_token_id")
    assert output.finished.guide_completed
    return output
