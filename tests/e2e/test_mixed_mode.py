from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.e2e.client_checks import TOKENIZER, ask, check_generated, generate_request, open_stub
from tests.e2e.deployment import Deployment, deployment

pytestmark = pytest.mark.slow

LONG = "def total(values):\n    result = 0\n" * 20


@pytest.fixture(scope="module")
def measured() -> Iterator[Deployment]:
    with deployment(handoff_min_tokens=None) as running:
        yield running


async def test_short_prompts_are_prefilled_by_the_decode_worker(measured: Deployment) -> None:
    channel, stub = open_stub(measured.address)
    ways = []
    async with channel:
        for number in range(20):
            prompt = f"# {number}\n" + (LONG if number % 4 == 0 else "x = 1\n")
            answer = await ask(stub, generate_request(prompt, max_tokens=8))
            check_generated(TOKENIZER.encode(prompt).ids, answer.ids, 8)
            assert answer.receipt.decode_worker.startswith("decode")
            assert bool(answer.receipt.handoff_bytes) <= bool(answer.receipt.prefill_worker)
            ways.append(answer.receipt.prefill_worker)
    assert ways[0], "nothing was measured yet"
    assert not all(ways), "a few tokens are computed sooner than their cache moves"
    await asyncio.to_thread(measured.settled)


async def test_a_fixed_threshold_is_kept() -> None:
    context = deployment(prefill=2, handoff_min_tokens=50)
    running = await asyncio.to_thread(context.__enter__)
    try:
        channel, stub = open_stub(running.address)
        async with channel:
            short = await ask(stub, generate_request("x = 1\n", max_tokens=8))
            assert short.receipt.prefill_worker == ""
            affinity_workers = set()
            for turn in range(3):
                request = generate_request(f"# session\n{LONG}# {turn}\n", max_tokens=8)
                request.cache.session_id = "s"
                request.cache.cache_salt = str(turn)  # nothing is shared: only the hint is left
                answer = await ask(stub, request)
                affinity_workers.add(answer.receipt.prefill_worker)
                assert answer.usage.cached_prompt_tokens == 0
            assert len(affinity_workers) == 1
            assert affinity_workers != {""}
            again = await ask(stub, request)
            assert again.usage.cached_prompt_tokens > 100
            assert again.ids == answer.ids
        await asyncio.to_thread(running.settled)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)
