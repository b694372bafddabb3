"""One request's life over scripted workers: it ends once, with the right tokens, and nothing is left of it."""

from __future__ import annotations

from protos import inference_pb2 as pb
from protos import worker_pb2 as wire
from protos.inference_pb2 import Generation
from router.request import Ended
from state.names import RequestKey
from state.store import Store
from tests.router.core import core, make_request, tokens_of
from tests.router.fake_worker import answer, fleet

P, D = ("p", wire.ROLE_PREFILL), ("d", wire.ROLE_DECODE)
D2, P2 = ("d2", wire.ROLE_DECODE), ("p2", wire.ROLE_PREFILL)
PROMPT = [1, 2, 3]


async def test_prompt_goes_through_both_pools_and_the_path_is_accounted_for(store: Store) -> None:
    async with fleet(P, D) as workers, core(store, workers) as scene:
        course = await scene.answer(make_request())
        assert tokens_of(course) == answer(PROMPT, 5)
        assert course.end == Ended(pb.FINISH_REASON_LENGTH)
        path = course.path
        assert (path.prefill_worker, path.decode_worker, path.attempts) == ("p", "d", 1)
        assert (path.prefill_s, path.handoff_s, path.decode_wait_s, path.handoff_bytes) == (2, 4, 5, 1234)
        assert path.queue_s is not None
        assert path.decode_began_at is not None
        assert course.cached_tokens == 3
        await scene.dispatcher.drain()
        stored = await store.requests.read(RequestKey("default", "r"))
        assert stored.state == Generation.STATE_SUCCEEDED
        assert [entry.token for entry in stored.entries] == answer(PROMPT, 5)
        assert [each.state for each in stored.record.transitions] == [
            Generation.STATE_QUEUED,
            Generation.STATE_PREFILLING,
            Generation.STATE_HANDING_OFF,
            Generation.STATE_DECODING,
            Generation.STATE_SUCCEEDED,
        ]
        assert stored.record.usage.completion_tokens == 5
