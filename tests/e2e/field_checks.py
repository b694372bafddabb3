"""A check for each field of a request, which its own module adds: `field` names the fields."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import TOKENIZER, Answer, ask, generate_request

PROMPT = "def total(values):\n    result = 0\n    for value in values:\n"
IDS = TOKENIZER.encode(PROMPT).ids
WRITTEN = 24
CHAT = "chat"

Stub = InferenceServiceStub
Check = Callable[[Stub], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def field(*names: str) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return add


def request(**parts: Any) -> pb.GenerateRequest:
    made = generate_request(PROMPT, max_tokens=WRITTEN)
    made.MergeFrom(pb.GenerateRequest(**parts))
    return made


async def plain(stub: Stub) -> Answer:
    return await ask(stub, request())
