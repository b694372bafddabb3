"""A deployment of quantized weights and KV caches, which is split and loses workers, gives the text of one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from decant import models
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, StopParams
from decant.engine.scheduler import Limits
from decant.protos.inference_pb2 import GetModelRequest
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.model_files import local_folder
from tests import gguf_files
from tests.e2e.client_checks import TOKENIZER, Answer, ask, generate_request, join_messages, open_stub
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, Process, deployment
from tests.e2e.test_killed_workers import PROMPT, owner_of_a_run
from tests.engine import tiny

pytestmark = pytest.mark.slow

TOKENS = 600


def alone() -> list[int]:
    kinds: Any = {"quantize": "int4", "kv_dtype": "int8"}
    config = ModelConfig(str(models.path()), dtype="bfloat16", device="cpu", kv_bytes=32 << 20, **kinds)
    engine = Engine(load(config), Limits(context_length=2048))
    prompt = tuple(TOKENIZER.encode(PROMPT).ids)
    return tiny.run(engine, [Request("r", prompt, stop=StopParams(max_tokens=TOKENS, ignore_eos=True))]).tokens["r"]


async def interrupted(stub: InferenceServiceStub, running: Deployment, interrupt: Callable[[Process], None]) -> Answer:
    """Generate TOKENS tokens, and interrupt the decode worker that writes them."""
    request = generate_request(PROMPT, max_tokens=TOKENS)
    request.stopping.ignore_eos = True
    messages, owner = [], None
    async for message in stub.GenerateStream(request, timeout=PATIENCE_S):
        messages.append(message)
        if owner is None and message.seq > 10 and (owner := await owner_of_a_run(running)):
            interrupt(owner.process)
            running.workers.remove(owner)
    answer = join_messages(messages)
    assert owner is not None
    assert not answer.receipt.decode_worker.endswith(f"-{owner.process.pid}")
    return answer


async def test_a_quantized_deployment_gives_the_text_of_one_engine_through_split_drain_and_failover() -> None:
    kinds = ("--quantize", "int4", "--kv-dtype", "int8")
    with deployment(decode=3, dtype="bfloat16", worker=(*SMALL_KV, *kinds)) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=8))
            assert answer.receipt.handoff_bytes > 0
            assert (await stub.GetModel(GetModelRequest())).quantization == "int4"
            expected = await asyncio.to_thread(alone)
            assert len(expected) == TOKENS
            assert expected[:8] == answer.ids
            for interrupt, attempts in ((Process.ask_to_end, 1), (Process.kill, 2)):
                answer = await interrupted(stub, running, interrupt)
                assert answer.receipt.attempts == attempts
                assert answer.ids == expected
        await asyncio.to_thread(running.settled)


@pytest.mark.parametrize("kinds", [("--quantize", "int4", "int8"), ("--kv-dtype", "int8", "auto")], ids=str)
async def test_workers_whose_formats_differ_exchange_no_caches(kinds: tuple[str, str, str]) -> None:
    option, one, other = kinds
    with deployment(worker=(*SMALL_KV, option, one), prefill_worker=(option, other)) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=8))
        assert len(answer.ids) == 8
        assert answer.receipt.handoff_bytes == 0
        assert answer.receipt.prefill_worker == ""
        await asyncio.to_thread(running.settled)


def as_gguf(path: Path) -> Path:
    """The trained model with weights in Q8_0. Its tokenizer splits a text as that of Qwen2 does."""
    described = json.loads((models.path() / "tokenizer.json").read_text())["model"]
    vocabulary = {"model": "gpt2", "pre": "qwen2", "tokens": list(described["vocab"]), "add_bos_token": True}
    vocabulary |= {"merges": [" ".join(merge) for merge in described["merges"]], "bos_token_id": 0, "eos_token_id": 1}
    vocabulary |= {"token_type": [gguf_files.CONTROL] * 2 + [gguf_files.NORMAL] * (len(described["vocab"]) - 2)}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()}
    return gguf_files.of_folder(models.path(), gguf_files.Type.Q8_0, metadata).write(path)


async def test_a_deployment_of_a_gguf_file_gives_the_text_of_one_engine_through_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = as_gguf(tmp_path / "tiny.gguf")
    with deployment(dtype="bfloat16", model=str(path), worker=SMALL_KV) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=40))
        folder = local_folder(str(path))
        tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
        config = ModelConfig(str(folder), dtype="bfloat16", device="cpu", kv_bytes=32 << 20)
        request = Request("r", tuple(tokenizer.encode(PROMPT).ids), stop=StopParams(max_tokens=40))
        expected = tiny.run(Engine(load(config), Limits(context_length=2048)), [request]).tokens["r"]
        assert answer.receipt.handoff_bytes > 0
        assert answer.ids == expected
        assert answer.text == tokenizer.decode(expected)
        await asyncio.to_thread(running.settled)
