from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.protos import inference_pb2 as pb
from decant.router.request.token_stream import TokenStream
from decant.runtime.error_details import Reason
from decant.runtime.errors import Aborted
from tests.router.factories import AT_LENGTH, STOPPED, valid, write
from tests.router.response_reader import EOS, Reader, ids_of, options, settle


@pytest.mark.slow
@given(st.data())
@settings(max_examples=80, deadline=None)
async def test_a_reader_that_starts_later_gets_the_rest_of_the_same_text(data):
    some = st.lists(st.integers(0, 4095).filter(lambda id: id != EOS), min_size=1, max_size=20)
    emoji = await ids_of("x😀👨‍👩‍👧")
    tokens = data.draw(some) + emoji[: data.draw(st.integers(0, len(emoji)))]
    end = data.draw(st.sampled_from([AT_LENGTH, STOPPED]))
    tokens = [*tokens, EOS] if end is STOPPED else tokens
    fields: dict[str, Any] = {
        "stopping": pb.StoppingParams(max_tokens=len(tokens)),
        "sampling": pb.SamplingParams(seed=1),
    }
    fields |= options(token_ids=True)
    first = Reader(TokenStream(await valid(request_id="r", **fields)))
    task = asyncio.create_task(first.read())
    for token in tokens:
        write(first.stream, token)
        await settle()
    write(first.stream, end=end)
    await task
    cut = data.draw(st.integers(0, len(first.messages) - 1))
    seen = first.messages[: cut + 1]
    later = Reader(first.stream, after_seq=seen[-1].seq)
    await later.read()
    assert later.messages[0].started == first.messages[0].started
    assert later.messages[0].seq == seen[-1].seq
    assert [message.WhichOneof("event") for message in later.messages].count("finished") == 1
    both = [message.delta for message in [*seen, *later.messages] if message.HasField("delta")]
    assert "".join(delta.text for delta in both) == first.text
    assert [id for delta in both for id in delta.token_ids] == tokens
    assert later.messages[-1].seq == len(tokens)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
async def test_a_delta_waits_for_min_chunk_tokens_except_at_the_end(data):
    chunk = data.draw(st.integers(0, 6))
    tokens = data.draw(st.lists(st.integers(2, 4095), min_size=1, max_size=20))
    fields = {"stream": pb.StreamOptions(min_chunk_tokens=chunk), **options(token_ids=True)}
    reader = Reader(TokenStream(await valid(**fields)))
    task = asyncio.create_task(reader.read())
    for done, token in enumerate(tokens, 1):
        write(reader.stream, token)
        await settle()
        least = max(1, chunk)
        assert sum(delta.num_tokens for delta in reader.deltas) == done - done % least
        assert bool(reader.messages) == (done >= least)
    write(reader.stream, end=AT_LENGTH)
    await task
    assert [id for delta in reader.deltas for id in delta.token_ids] == tokens
    assert all(delta.num_tokens >= chunk for delta in reader.deltas[:-2])
    after = data.draw(st.integers(0, len(tokens)))
    later = Reader(reader.stream, after_seq=after)
    await later.read()
    assert [id for delta in later.deltas for id in delta.token_ids] == tokens[after:]


async def test_an_error_flushes_what_waits_for_more():
    reader = Reader(TokenStream(await valid(stream=pb.StreamOptions(min_chunk_tokens=9))))
    task = asyncio.create_task(reader.read())
    write(reader.stream, 5, 6)
    await settle()
    assert not reader.messages
    write(reader.stream, end=Aborted(Reason.WORKERS_LOST, "no worker is left"))
    with pytest.raises(Aborted):
        await task
    assert [delta.num_tokens for delta in reader.deltas] == [2]
