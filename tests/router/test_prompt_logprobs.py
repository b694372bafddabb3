from __future__ import annotations

import asyncio
from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import TokenStream
from decant.router.text.output_text import OutputOptions
from decant.runtime.errors import InvalidArgument
from decant.runtime.packed import unpack
from decant.state.store import Store
from tests.router.factories import AT_LENGTH, begin_writing, tiny, valid, write
from tests.router.fake_worker import fleet
from tests.router.harness import core, make_request, until, until_ended
from tests.router.response_reader import Reader, options, read, settle

P, D, D2 = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE), ("d2", wire.ROLE_DECODE)
PROMPT = (1, 2, 3, 4, 5, 6)
THEIRS = [-1.0, -2.0, -3.0, -4.0, -5.0]


# ------------------------------------------------------------------------------------------------- echo


async def test_the_prompt_is_sent_once_before_the_output():
    tokens = await tiny().encode("return x", special=False)
    reader = await read(tokens, **options(echo=True))
    assert reader.text == "def f(x):return x"
    assert reader.messages[1].seq >= 1  # with the first token: a client with seq 0 has no text
    late = Reader(reader.stream, after_seq=1)
    await late.read()
    assert "def f" not in late.text
    response, _ = await Reader(reader.stream).answer.collect(reader.account)
    assert response.outputs[0].text == reader.text


async def test_a_prompt_of_tokens_is_shown_as_text_like_the_output_is():
    ids = [0, *await tiny().encode("x = 日", special=False)]
    for skip, shown in (True, "x = 日"), (False, "<|begin|>x = 日"):
        made = await valid(token_ids=pb.TokenIds(ids=ids), **options(echo=True, skip_special_tokens=skip))
        assert made.output_options.echo == tiny().tokenizer.decode(ids, skip_special_tokens=skip)
        assert made.output_options.echo.endswith(shown[-5:])


async def test_a_stop_string_in_the_prompt_stops_nothing():
    tokens = await tiny().encode("return x", special=False)
    made = await valid(stopping=pb.StoppingParams(stop=["f(x)", ":r"]), **options(echo=True))
    writer = begin_writing(TokenStream(made))
    for place, token in enumerate(tokens):
        writer.write(made.prompt_tokens + place, token)
    assert writer.finish is None


async def test_an_echo_without_text_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        await valid(**options(echo=True, text=False))
    assert refused.value.field == "response.echo"


# ------------------------------------------------------------------------------------- prompt logprobs


def write_prompt_logprobs(stream: TokenStream, first: int, end: int) -> None:
    entries = [wire.TokenLogprobs(logprob=-position, rank=1) for position in range(first, end)]
    stream.add_prompt_logprobs(wire.PromptLogprobs(first_position=first, logprobs=entries))


async def test_each_token_of_the_prompt_has_one_and_the_first_follows_nothing():
    reader = Reader(TokenStream(await valid(**options(prompt_logprobs=0))))
    count = reader.stream.request.prompt_tokens
    task = asyncio.create_task(reader.read())
    write_prompt_logprobs(reader.stream, 1, 3)
    write(reader.stream, 5)
    await settle()
    assert not reader.messages  # some are still to come
    write_prompt_logprobs(reader.stream, 3, count)
    await settle()
    write(reader.stream, end=AT_LENGTH)
    await task
    found = reader.messages[0].started.prompt_logprobs
    assert [entry.token_id for entry in found] == list(unpack(reader.stream.request.engine_request.prompt))
    assert b"".join(entry.raw_bytes for entry in found).endswith(b"def f(x):")
    assert not found[0].HasField("logprob")
    assert [entry.logprob for entry in found[1:]] == [-position for position in range(1, count)]
    response, _ = await Reader(reader.stream).answer.collect(reader.account)
    assert list(response.prompt_logprobs) == list(found)


async def test_repeated_prompt_logprobs_count_once_and_surplus_ones_not_at_all():
    made = await valid(**options(prompt_logprobs=1))
    stream, count = TokenStream(made), made.prompt_tokens
    for first, end in (1, 3), (1, 2), (2, 4), (5, count), (1, count + 9):
        write_prompt_logprobs(stream, first, end)
    assert [found.logprob for found in stream.prompt_logprobs] == [-position for position in range(1, count)]


async def test_there_are_no_prompt_logprobs_unless_requested():
    assert not (await read([5])).messages[0].started.prompt_logprobs


async def test_a_prompt_of_one_token_waits_for_nothing():
    reader = await read([5], token_ids=pb.TokenIds(ids=[7]), **options(prompt_logprobs=3))
    (only,) = reader.messages[0].started.prompt_logprobs
    assert (only.token_id, only.HasField("logprob")) == (7, False)


@pytest.mark.parametrize("pools", [(P, D), (D,), (P,)])
async def test_workers_of_both_roles_report_prompt_logprobs(store: Store, pools: Any) -> None:
    async with fleet(*pools) as workers, core(store, workers) as harness:
        stream = await harness.answer(valid_request())
        assert [found.logprob for found in stream.prompt_logprobs] == THEIRS


@pytest.mark.rule("output-waits-for-prompt-logprobs", "router/attempt/attempt.py:Attempt._until_prompt_logprobs")
async def test_an_answer_that_is_written_waits_for_those_that_are_on_their_way(store: Store) -> None:
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode]) as harness:
        prefill.script.reports_late = True
        stream = await harness.requests.begin(valid_request())
        await until(lambda: decode.forgotten)
        assert stream.outputs[0].tokens
        assert stream.end is None
        prefill.go.set()
        await until_ended(stream)
        assert [found.logprob for found in stream.prompt_logprobs] == THEIRS


@pytest.mark.parametrize("fault", ["prefill_fails_after_ticket", "prefill_breaks_after_ticket"])
async def test_prompt_logprobs_of_a_lost_worker_are_completed_by_the_next(store: Store, fault: str) -> None:
    async with fleet(P, D) as (prefill, decode), core(store, [prefill, decode]) as harness:
        setattr(prefill.script, fault, 1)
        stream = await harness.answer(valid_request())
        assert [found.logprob for found in stream.prompt_logprobs] == THEIRS
        assert stream.trace.attempts == 2


async def test_prompt_logprobs_survive_the_loss_of_a_decode_worker(store: Store) -> None:
    async with fleet(D, D2) as workers, core(store, workers) as harness:
        for worker in workers:
            worker.script.fails_at = [2]
        stream = await harness.answer(valid_request())
        assert [found.logprob for found in stream.prompt_logprobs] == THEIRS


def valid_request() -> Any:
    made = make_request(prompt=PROMPT, output_options=OutputOptions(prompt_logprobs=0))
    made.engine_request.prompt_logprobs = 0
    return made
