"""A deployment of quantized weights, which is split and loses a worker, gives the text that one engine gives alone."""

from __future__ import annotations

import asyncio

import pytest

from decant import models
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from tests.e2e.client_checks import TOKENIZER, ask, generate_request, open_stub
from tests.e2e.deployment import SMALL_KV, deployment
from tests.e2e.test_killed_workers import PROMPT, TOKENS, tokens
from tests.engine import tiny

pytestmark = pytest.mark.slow


def alone() -> list[int]:
    config = ModelConfig(str(models.path()), dtype="bfloat16", device="cpu", kv_bytes=32 << 20, quantize="int4")
    engine = Engine(load(config), Limits(context_length=2048))
    prompt = tuple(TOKENIZER.encode(PROMPT).ids)
    return tiny.run(engine, [Request("r", prompt, stop=StopParams(max_tokens=TOKENS, ignore_eos=True))]).tokens["r"]


async def test_a_quantized_deployment_gives_the_text_of_one_engine_through_split_and_failover() -> None:
    with deployment(decode=2, dtype="bfloat16", worker=(*SMALL_KV, "--quantize", "int4")) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=8))
            assert answer.receipt.handoff_bytes > 0
            expected = await asyncio.to_thread(alone)
            assert len(expected) == TOKENS
            assert expected[:8] == answer.ids
            assert await tokens(stub, running) == expected
        await asyncio.to_thread(running.settled)


async def test_workers_whose_formats_differ_exchange_no_caches() -> None:
    with deployment(worker=(*SMALL_KV, "--quantize", "int4"), prefill_worker=("--quantize", "int8")) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=8))
        assert len(answer.ids) == 8
        assert answer.receipt.handoff_bytes == 0
        assert answer.receipt.prefill_worker == ""
        await asyncio.to_thread(running.settled)
