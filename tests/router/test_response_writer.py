from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import ResponseWriter
from decant.router.request.output import Finish
from decant.router.request.token_stream import TokenStream
from decant.router.text.served_model import load
from decant.runtime.error_details import Reason, ResumePoint
from decant.runtime.errors import Aborted
from tests.router.factories import AT_LENGTH, STOPPED, model, tiny, valid, write
from tests.router.response_reader import EOS, Reader, ids_of, options, read, settle
from tests.router.tokenizer_factories import MADE, folder


async def test_a_stream_reads_started_deltas_finished():
    reader = Reader(TokenStream(await valid(request_id="r", sampling=pb.SamplingParams(seed=9))))
    reader.stream.cached_tokens = 2
    task = asyncio.create_task(reader.read())
    await settle()
    assert not reader.messages  # nothing before the first token
    for token in await ids_of("x = 1"):
        write(reader.stream, token)
        await settle()
    write(reader.stream, EOS, end=STOPPED)
    await task
    kinds = [message.WhichOneof("event") for message in reader.messages]
    count = len(reader.stream.outputs[0].tokens)
    assert kinds == ["started", *["delta"] * count, "finished"]
    assert {message.request_id for message in reader.messages} == {"r"}
    assert [message.seq for message in reader.messages] == [0, *range(1, count + 1), count]
    started = reader.messages[0].started
    assert (started.model, started.seed, started.cached_tokens, started.resumable) == ("tiny-python", 9, 2, True)
    assert started.prompt_tokens == reader.stream.request.prompt_tokens
    assert reader.text == "x = 1"


async def test_usage_and_receipt_stand_on_the_last_message_alone():
    reader = await read([5, 6, EOS], STOPPED)
    *others, last = reader.messages
    assert last.finished == pb.Finished(finish_reason=pb.FINISH_REASON_STOP, eos_token_id=EOS)
    assert last.usage.completion_tokens == 3
    assert last.usage.total_tokens == last.usage.prompt_tokens + 3
    assert last.HasField("receipt")
    assert not any(message.HasField("usage") or message.HasField("receipt") for message in others)


@pytest.mark.rule(
    "unread-stream-keeps-token-ids",
    "router/request/token_stream.py:TokenStream",
    "router/api/response_writer.py:OutputReader.fill_delta",
)
async def test_tokens_that_arrive_together_come_in_one_delta():
    gate = asyncio.Event()
    reader = Reader(TokenStream(await valid(**options(token_ids=True))), gate.wait)
    write(reader.stream, 5)
    task = asyncio.create_task(reader.read())
    await settle()
    write(reader.stream, 6)
    write(reader.stream, 7, 8)
    write(reader.stream, EOS, end=STOPPED)
    gate.set()
    await task
    assert [list(delta.token_ids) for delta in reader.deltas] == [[5, 6, 7, 8, EOS]]
    assert reader.messages[-1].seq == 5


@pytest.mark.rule(
    "text-independent-of-messages",
    "router/text/output_text.py:OutputText.add",
    "router/text/output_text.py:StoppableText.add",
)
@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
async def test_the_text_after_so_many_tokens_is_the_same_at_any_pace(data):
    tokens = data.draw(st.lists(st.integers(0, 4095).filter(lambda id: id != EOS), min_size=1, max_size=30))
    end = data.draw(st.sampled_from([AT_LENGTH, STOPPED]))
    if end is STOPPED:
        tokens = [*tokens, EOS]
    wanted = {"skip_special_tokens": data.draw(st.booleans()), "token_ids": True, "logprobs": 1}
    fields = {"request_id": "r", "sampling": pb.SamplingParams(seed=1), **options(**wanted)}
    one_by_one = Reader(TokenStream(await valid(**fields)))
    cut = Reader(TokenStream(await valid(**fields)))
    for reader, sizes in ((one_by_one, st.just(1)), (cut, st.integers(1, 8))):
        task = asyncio.create_task(reader.read())
        done = 0
        while done < len(tokens):
            more = data.draw(sizes)
            write(reader.stream, *tokens[done : done + more])
            done += more
            await settle()
        write(reader.stream, end=end)
        await task
    after = {0: ""}
    for message in one_by_one.messages:
        after[message.seq] = after.get(message.seq, after.get(message.seq - 1, "")) + message.delta.text
    text = ""
    for message in cut.messages[:-1]:
        text += message.delta.text
        if message.seq < len(tokens):
            assert text == after[message.seq]
    shown = tokens[:-1] if end is STOPPED else tokens
    assert text == tiny().tokenizer.decode(shown, skip_special_tokens=wanted["skip_special_tokens"])
    for reader in (one_by_one, cut):
        assert [id for delta in reader.deltas for id in delta.token_ids] == tokens
        assert [found.token_id for delta in reader.deltas for found in delta.logprobs] == tokens
        assert sum(delta.num_tokens for delta in reader.deltas) == len(tokens)
        assert all(len(delta.logprobs) == len(delta.token_ids) == delta.num_tokens for delta in reader.deltas)


@pytest.mark.slow
async def test_no_message_is_larger_than_a_client_receives_by_default() -> None:
    reader = Reader(TokenStream(await valid(response=pb.ResponseOptions(logprobs=20))))
    write(reader.stream, *[5] * 16_000, end=AT_LENGTH)
    messages = await reader.read()
    assert sum(delta.num_tokens for delta in reader.deltas) == 16_000
    assert max(message.ByteSize() for message in messages) < 4 << 20


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("end_known", [True, False])
async def test_a_token_that_stops_counts_and_has_no_text(skip, end_known):
    (colon,) = await ids_of(":")
    for last, end in (EOS, STOPPED), (colon, Finish(pb.FINISH_REASON_STOP, stop_token_id=colon)):
        stopping = pb.StoppingParams(stop_token_ids=[colon])
        asked = options(skip_special_tokens=skip, token_ids=True)
        reader = Reader(TokenStream(await valid(stopping=stopping, **asked)))
        task = asyncio.create_task(reader.read())
        write(reader.stream, *await ids_of("return x"))
        write(reader.stream, last, end=end if end_known else None)
        await settle()
        write(reader.stream, end=end)
        await task
        assert reader.text == "return x"
        assert reader.deltas[-1].token_ids[-1] == last
        assert reader.messages[-1].usage.completion_tokens == len(reader.stream.outputs[0].tokens)
        assert reader.messages[-1].finished.WhichOneof("stop_match") == (
            "eos_token_id" if last == EOS else "stop_token_id"
        )


async def test_an_end_that_is_ignored_is_a_token_like_others():
    stopping = pb.StoppingParams(ignore_eos=True)
    x = await ids_of("x")
    shown = await read([EOS, *x, EOS], stopping=stopping, **options(skip_special_tokens=False))
    assert shown.text == "<|end|>x<|end|>"
    assert (await read([EOS, *x, EOS], stopping=stopping)).text == "x"


async def test_an_incomplete_character_comes_at_the_end_before_finished():
    tokens = (await ids_of("x😀"))[:-1]
    assert (await read(tokens)).text == "x\ufffd"
    reader = Reader(TokenStream(await valid()))
    task = asyncio.create_task(reader.read())
    write(reader.stream, *tokens)
    await settle()
    assert reader.text == "x"
    write(reader.stream, end=AT_LENGTH)
    await task
    assert reader.text == "x\ufffd"
    assert sum(delta.num_tokens for delta in reader.deltas) == len(tokens)
    assert reader.messages[-1].WhichOneof("event") == "finished"


async def test_fields_that_were_not_requested_are_unset():
    plain = await read([5, 6])
    assert all(delta.text and not delta.token_ids and not delta.logprobs for delta in plain.deltas)
    silent = await read([5, 6], **options(text=False, token_ids=True))
    assert [list(delta.token_ids) for delta in silent.deltas] == [[5, 6]]
    assert silent.text == ""


async def test_log_probabilities_have_their_tokens_text_and_exact_bytes():
    emoji = await ids_of("😀")
    reader = await read([*emoji, EOS], STOPPED, **options(logprobs=2))
    found = [entry for delta in reader.deltas for entry in delta.logprobs]
    assert b"".join(entry.raw_bytes for entry in found) == "😀<|end|>".encode()
    assert found[0].token == "\ufffd"
    assert all((entry.logprob, entry.rank) == (-0.5, 1) for entry in found)
    for entry in found:
        assert [top.token_id for top in entry.top] == [entry.token_id, entry.token_id + 1]
        assert (entry.top[0].token, entry.top[0].raw_bytes) == (entry.token, entry.raw_bytes)
        assert [top.logprob for top in entry.top] == [-0.5, -1.5]


async def test_logprobs_without_requested_alternatives_have_none():
    (entry,) = (await read([5], **options(logprobs=0))).deltas[0].logprobs
    assert not entry.top
    assert entry.HasField("logprob")


async def test_an_error_is_raised_after_the_text_that_is_certain():
    lost = Aborted(Reason.WORKERS_LOST, "no worker is left", resume=ResumePoint(0, 2))
    reader = Reader(TokenStream(await valid()))
    write(reader.stream, 5, 6, end=lost)
    with pytest.raises(Aborted):
        await reader.read()
    assert [message.WhichOneof("event") for message in reader.messages] == ["started", "delta"]
    assert reader.deltas[0].num_tokens == 2


async def test_an_error_before_the_first_token_comes_alone():
    reader = Reader(TokenStream(await valid()))
    write(reader.stream, end=Aborted(Reason.WORKERS_LOST, "no worker is left"))
    with pytest.raises(Aborted):
        await reader.read()
    assert reader.messages == []


async def test_an_error_does_not_flush_held_text():
    reader = Reader(TokenStream(await valid()))
    write(reader.stream, *(await ids_of("x😀"))[:-1], end=Aborted(Reason.WORKERS_LOST, "no worker is left"))
    with pytest.raises(Aborted):
        await reader.read()
    assert reader.text == "x"


@pytest.mark.slow
@given(st.lists(st.integers(0, 4095).filter(lambda id: id != EOS), min_size=1, max_size=20), st.booleans())
@settings(max_examples=60, deadline=None)
async def test_the_whole_answer_is_the_stream_joined(tokens, stops):
    end = STOPPED if stops else AT_LENGTH
    tokens = [*tokens, EOS] if stops else tokens
    asked = {"sampling": pb.SamplingParams(seed=3), **options(token_ids=True, logprobs=1)}
    stream = await read(tokens, end, **asked)
    reader = Reader(TokenStream(await valid(**asked)))
    task = asyncio.create_task(reader.answer.collect(reader.account))
    for token in tokens:
        write(reader.stream, token)
    write(reader.stream, end=end)
    response, ended = await task
    (output,) = response.outputs
    assert ended is end
    assert output.text == stream.text
    assert list(output.token_ids) == tokens
    assert list(output.logprobs) == [entry for delta in stream.deltas for entry in delta.logprobs]
    assert output.finished == stream.messages[-1].finished
    assert response.usage == stream.messages[-1].usage
    assert (response.model, response.seed) == ("tiny-python", 3)
    assert response.HasField("receipt")


async def test_the_whole_answer_raises_the_streams_error():
    reader = Reader(TokenStream(await valid()))
    write(reader.stream, 5, end=Aborted(Reason.WORKERS_LOST, "no worker is left"))
    with pytest.raises(Aborted):
        await reader.answer.collect(reader.account)


async def test_stop_tokens_are_those_of_the_model():
    stream = TokenStream(await valid())
    write(stream, 5, 6, end=Finish(pb.FINISH_REASON_STOP, eos_token_id=6))
    other = model(eos_token_ids=frozenset({6}))
    response, _ = await ResponseWriter(stream, other).collect(Reader(stream).account)
    assert response.outputs[0].text == tiny().tokenizer.decode([5])


@pytest.fixture(params=["byte_fallback", "metaspace", "word_piece", "end_of_word"])
def spaced(request, tmp_path):
    """A model whose tokenizer writes the space before a word in the word's token."""
    return load(
        [str(folder(tmp_path / "m", MADE[request.param](), {"chat_template": "{{ messages[0].content }}"}))]
    ).default


async def test_the_first_word_after_a_prompt_has_its_space_in_text_echo_and_logprobs(spaced):
    prompt, tokens = await spaced.encode("the dog"), await spaced.encode("the", special=False)
    for source in ({"prompt": "the dog"}, {"token_ids": pb.TokenIds(ids=prompt)}):
        plain = await read(tokens, served=spaced, **source, **options(logprobs=0))
        assert plain.text == " the"
        assert "".join(one.token for delta in plain.deltas for one in delta.logprobs).strip() == "the"
        echo = await read(tokens, served=spaced, **source, **options(echo=True))
        assert echo.text == "the dog the" == spaced.tokenizer.decode([*prompt, *tokens])


async def test_a_resumed_stream_has_the_same_spaces(spaced):
    tokens = [*await spaced.encode("the", special=False), *await spaced.encode("dog", special=False)]
    stream = TokenStream(await valid(served=spaced, prompt="the dog"))
    write(stream, *tokens, end=AT_LENGTH)
    whole = Reader(stream, served=spaced)
    await whole.read()
    for count in range(1, len(tokens)):
        rest = Reader(stream, after_seq=count, served=spaced)
        await rest.read()
        assert whole.text.endswith(rest.text)
    assert whole.text == " the dog"


async def test_an_answer_in_a_conversation_begins_without_a_space_unless_it_follows_an_echo(spaced):
    tokens = await spaced.encode("dog", special=False)
    messages = pb.Messages(messages=[pb.Message(role="user", content="the")])
    assert (await read(tokens, served=spaced, messages=messages)).text == "dog"
    assert (await read(tokens, served=spaced, messages=messages, **options(echo=True))).text == "the dog"
