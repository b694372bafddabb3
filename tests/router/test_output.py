from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from decant.router.request.token_stream import TokenStream
from decant.router.workers.subscription import WriteError
from tests.router.factories import begin_writing
from tests.router.harness import ended_run, make_request


@given(st.lists(st.integers(0, 9), max_size=60), st.data())
def test_tokens_in_any_order_and_repetition_are_each_written_once(order: list[int], data: st.DataObject) -> None:
    async def main() -> None:
        stream = TokenStream(make_request(max_tokens=10))
        writer = begin_writing(stream)
        for k in order:
            known = len(stream.outputs[0].tokens)
            trouble = writer.write(3 + k, 100 + k)
            assert trouble is (WriteError.GAP if k > known else None)
        assert stream.outputs[0].tokens == [100 + k for k in range(len(stream.outputs[0].tokens))]
        for k, token in enumerate(stream.outputs[0].tokens):
            assert writer.write(3 + k, token + 1) is WriteError.CONFLICT
        assert writer.write(2, 1) is WriteError.CONFLICT
        assert writer.write(writer.position, 1 << 24) is WriteError.MALFORMED
        assert stream.outputs[0].tokens == [100 + k for k in range(len(stream.outputs[0].tokens))]

    asyncio.run(main())


async def test_nothing_is_written_to_a_stream_that_has_ended() -> None:
    stream = TokenStream(make_request())
    writer = begin_writing(stream)
    writer.write(3, 7)
    stream.end = ended_run()
    writer.write(4, 8)
    assert stream.outputs[0].tokens == [7]
