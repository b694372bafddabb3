from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import Any, cast

import pytest

from decant.protos import inference_pb2 as pb
from decant.router.api.auth import NoAuthentication
from decant.router.api.generation_calls import GenerationCalls
from decant.router.api.service import InferenceService, ServerInfoSource
from decant.router.api.validation import check_known, validate
from decant.router.text.chat_template import ChatTemplate
from decant.router.text.served_model import Models
from decant.router.text.token_bounds import TextBound
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import InvalidArgument, Unimplemented
from decant.runtime.telemetry.metrics import Registry, RequestMetrics
from decant.state.ids import Incarnation
from tests.router.factories import ScriptedRegistry, context_length, model

LONGEST_STALL = 0.1
"""Seconds of the process's CPU time in which the loop does not run. Other processes of a busy machine stop it, too, but
use none of that."""

LONGEST_WORK = 0.04
"""Seconds of CPU time that the loop's own thread uses at once, which no other thread adds to. Each input but bare
token ids costs above 0.06 s where the loop does the work."""

TRIES = 20
"""While the loop waits for a core, other threads of the process may have one, but not every time."""

TEXT = "def f(x):\n    return x\n" * (1 << 15)
"""750 KB, which take some 0.4 s to tokenize."""
IDS = [5] * 700_000
FITS = 1 << 20


@cache
def served() -> Any:
    return model(max_context_length=FITS, chat=ChatTemplate("{{ messages[0].content }}", {}))


async def generate(request: pb.GenerateRequest) -> None:
    made = await validate(request, Models([served()]), context_length(FITS), Deadline(), "t")
    assert made.prompt_tokens > 300_000


async def tokenize(request: pb.TokenizeRequest) -> None:
    assert (await service().Tokenize(request, Context())).count > 300_000


async def detokenize(request: pb.DetokenizeRequest) -> None:
    assert (await service().Detokenize(request, Context())).text


def service() -> InferenceService:
    about = ServerInfoSource(Incarnation("r", 1), "0", pb.Limits(), lambda: True, lambda: False)
    models, metrics = Models([served()]), RequestMetrics(Registry(process=False))
    requests = cast(Any, ScriptedRegistry())
    return InferenceService(
        GenerationCalls(models, requests, metrics), requests, about, NoAuthentication(models), cast(Any, None)
    )


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    def time_remaining(self) -> float | None:
        return None


CONVERSATION = pb.Messages(messages=[pb.Message(role="user", content=TEXT)])
ECHO = pb.ResponseOptions(echo=True)

CASES: dict[str, Callable[[], Awaitable[None]]] = {
    "a prompt": partial(generate, pb.GenerateRequest(prompt=TEXT)),
    "a conversation": partial(generate, pb.GenerateRequest(messages=CONVERSATION)),
    "token ids": partial(generate, pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS))),
    "token ids, shown again": partial(generate, pb.GenerateRequest(token_ids=pb.TokenIds(ids=IDS), response=ECHO)),
    "Tokenize": partial(tokenize, pb.TokenizeRequest(text=TEXT)),
    "Tokenize with the tokens' texts": partial(tokenize, pb.TokenizeRequest(text=TEXT, return_tokens=True)),
    "Detokenize": partial(detokenize, pb.DetokenizeRequest(token_ids=IDS)),
}


async def longest_stall(work: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.process_time) -> float:
    longest, last = 0.0, clock()

    async def tick() -> None:
        nonlocal longest, last
        while True:
            await asyncio.sleep(0.002)
            now = clock()
            longest, last = max(longest, now - last), now

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    longest = 0.0
    await work()
    await asyncio.sleep(0.01)
    ticking.cancel()
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("what", CASES)
async def test_the_event_loop_runs_while_an_accepted_input_is_validated(what: str) -> None:
    stalls: list[float] = []
    while not stalls or (min(stalls) >= LONGEST_STALL and len(stalls) < TRIES):
        stalls.append(await longest_stall(CASES[what]))
    assert min(stalls) < LONGEST_STALL, stalls


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in CASES if what != "token ids"])
async def test_the_thread_of_the_event_loop_leaves_long_inputs_to_others(what: str) -> None:
    works: list[float] = []
    while not works or (min(works) >= LONGEST_WORK and len(works) < TRIES):
        works.append(await longest_stall(CASES[what], time.thread_time))
    assert min(works) < LONGEST_WORK, works


@pytest.mark.slow
async def test_the_event_loop_runs_while_the_words_of_a_long_text_are_counted() -> None:
    made = model(max_context_length=FITS)
    object.__setattr__(made, "bound", TextBound(4, skips_spaces=True))
    request = pb.GenerateRequest(prompt="a b " * 3_900_000)

    async def refused() -> None:
        with pytest.raises(InvalidArgument, match="at least"):
            await validate(request, Models([made]), context_length(FITS), Deadline(), "t")

    stalls: list[float] = []
    while not stalls or (min(stalls) >= LONGEST_STALL and len(stalls) < TRIES):
        stalls.append(await longest_stall(refused))
    assert min(stalls) < LONGEST_STALL, stalls


async def test_the_event_loop_runs_while_unknown_fields_are_refused() -> None:
    unknown = b"\xc0\x3e\x01" * (1 << 20)  # field 1000, a million times
    stalls: list[float] = []

    async def refused() -> None:
        for fields in (unknown, b"\x32" + b"\x80\x80\xc0\x01" + unknown):  # of the request, and of its sampling
            with pytest.raises(Unimplemented) as error:
                check_known(pb.GenerateRequest.FromString(fields))
            assert error.value.field == "GenerateRequest"
            assert error.value.value.endswith(" bytes of unknown fields")
            await asyncio.sleep(0)

    while not stalls or (min(stalls) >= LONGEST_STALL and len(stalls) < TRIES):
        stalls.append(await longest_stall(refused))
    assert min(stalls) < LONGEST_STALL, stalls


def test_an_unknown_field_beside_a_long_prompt_is_refused_by_its_number() -> None:
    message = pb.GenerateRequest(prompt=TEXT, sampling=pb.SamplingParams.FromString(b"\xc0\x3e\x01"))
    with pytest.raises(Unimplemented) as error:
        check_known(message)
    assert error.value.field == "SamplingParams.1000"
    check_known(pb.GenerateRequest(prompt=TEXT, sampling=pb.SamplingParams(top_k=1)))
