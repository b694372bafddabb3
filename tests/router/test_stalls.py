"""No accepted input stops the event loop, on which every stream of a router is written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from protos import inference_pb2 as pb
from router.credentials import Call, Tenant
from router.models import Models
from router.service import About, InferenceService
from router.templates import ChatTemplate
from router.validation import validate
from runtime.channel import Deadline
from runtime.metrics import Registry, RequestMetrics
from state.names import Life
from tests.router.scenes import ScriptedDispatcher, model, window

LONGEST_STALL = 0.1
TRIES = 8
"""Other processes of a busy machine stop the loop too, but not every time."""

TEXT = "def f(x):\n    return x\n" * (1 << 15)
"""750 KB, which take some 0.4 s to tokenize."""
IDS = [5] * 700_000
FITS = 1 << 20


def served() -> Any:
    return model(window=FITS, chat=ChatTemplate("{{ messages[0].content }}", {}))


async def generate(**fields: Any) -> None:
    made = await validate(pb.GenerateRequest(**fields), Models([served()]), window(FITS), Deadline(), "t")
    assert made.prompt_tokens > 300_000


async def tokenize(**fields: Any) -> None:
    assert (await service().Tokenize(pb.TokenizeRequest(**fields), call())).count > 300_000


async def detokenize() -> None:
    assert (await service().Detokenize(pb.DetokenizeRequest(token_ids=IDS), call())).text


def service() -> InferenceService:
    about = About(Life("r", 1), "0", pb.Limits(), lambda: True, lambda: False)
    return InferenceService(Models([served()]), ScriptedDispatcher(), about, RequestMetrics(Registry(process=False)))


def call() -> Call:
    class Context:
        def time_remaining(self) -> float | None:
            return None

    return Call(Tenant("t", Models([served()])), cast(Any, Context()))


def said(text: str) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content=text)])


CASES: dict[str, Callable[[], Awaitable[None]]] = {
    "a prompt": lambda: generate(prompt=TEXT),
    "a conversation": lambda: generate(messages=said(TEXT)),
    "token ids": lambda: generate(token_ids=pb.TokenIds(ids=IDS)),
    "token ids, shown again": lambda: generate(token_ids=pb.TokenIds(ids=IDS), response=pb.ResponseOptions(echo=True)),
    "Tokenize": lambda: tokenize(text=TEXT),
    "Tokenize with the tokens' texts": lambda: tokenize(text=TEXT, return_tokens=True),
    "Detokenize": detokenize,
}


async def longest_stall(work: Callable[[], Awaitable[None]]) -> float:
    """Seconds for which the event loop did nothing else, at most."""
    longest, last = 0.0, time.perf_counter()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.002)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    longest = 0.0
    await work()
    await asyncio.sleep(0.01)
    ticking.cancel()
    return longest


@pytest.mark.parametrize("what", CASES)
async def test_the_event_loop_goes_on_while_an_accepted_input_is_validated(what: str) -> None:
    stalls: list[float] = []
    while not stalls or (min(stalls) >= LONGEST_STALL and len(stalls) < TRIES):
        stalls.append(await longest_stall(CASES[what]))
    assert min(stalls) < LONGEST_STALL, stalls
