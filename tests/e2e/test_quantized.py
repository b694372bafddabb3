"""A deployment of quantized weights and KV caches, which is split and loses workers, gives the text of one engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from decant import models
from decant.engine.engine import Engine
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from decant.engine.request import Request, SamplingParams, StopParams
from decant.engine.scheduler import Limits
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2 import GetModelRequest
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.runtime.model_files import local_folder
from tests import gguf_files
from tests.e2e.client_checks import TOKENIZER, ask, generate_request, open_stub
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, Process, deployment
from tests.e2e.test_killed_workers import PROMPT, owner_of_a_run
from tests.engine import peft_adapters, tiny

pytestmark = pytest.mark.slow

TOKENS = 300
"""Of each output."""
OUTPUTS, SEED = 2, 3
BASE = "base"


def alone(adapters: Mapping[str, Path]) -> dict[str, list[list[int]]]:
    """Outputs of one engine, by adapter; ``BASE`` is of none, and greedy."""
    kinds: Any = {"quantize": "int4", "kv_dtype": "int8", "adapters": True}
    device = load(ModelConfig(str(models.path()), dtype="bfloat16", device="cpu", kv_bytes=32 << 20, **kinds))
    engine, requests = Engine(device, Limits(context_length=2048)), [tiny.greedy(BASE, TOKENIZER.encode(PROMPT).ids, 8)]
    for name, folder in adapters.items():
        engine.add_adapter(prepared := device.adapters.load(name, folder))
        for index in range(OUTPUTS):
            sampling = SamplingParams(temperature=1.0, seed=SEED, output_index=index)
            request = tiny.greedy(f"{name}{index}", requests[0].token_ids, TOKENS, adapter=prepared.digest)
            requests.append(replace(request, sampling=sampling))
    tokens = tiny.run(engine, requests).tokens
    return {BASE: [tokens[BASE]]} | {name: [tokens[f"{name}{index}"] for index in range(OUTPUTS)] for name in adapters}


async def interrupted(
    stub: InferenceServiceStub, running: Deployment, adapter: str, interrupt: Callable[[Process], None]
) -> tuple[pb.Receipt, list[list[int]]]:
    """Generate with an adapter, and interrupt the decode worker that writes the outputs."""
    sampling = pb.SamplingParams(temperature=1.0, seed=SEED, n=OUTPUTS)
    request = generate_request(PROMPT, sampling=sampling, max_tokens=TOKENS)
    request.stopping.ignore_eos, request.lora_name = True, adapter
    outputs: list[list[int]] = [[] for _ in range(OUTPUTS)]
    owner, receipt = None, pb.Receipt()
    async for message in stub.GenerateStream(request, timeout=PATIENCE_S):
        outputs[message.delta.index] += message.delta.token_ids
        receipt = message.receipt
        if owner is None and message.seq > 10 and (owner := await owner_of_a_run(running)):
            interrupt(owner.process)
            running.workers.remove(owner)
    assert owner is not None
    assert not receipt.decode_worker.endswith(f"-{owner.process.pid}")
    return receipt, outputs


async def test_a_quantized_deployment_with_adapters_gives_the_text_of_one_engine_through_split_drain_and_failover(
    tmp_path: Path,
) -> None:
    kinds = ("--quantize", "int4", "--kv-dtype", "int8")
    adapters = {
        name: peft_adapters.for_model(tmp_path / name, models.path(), rank=rank, seed=rank)
        for name, rank in (("pirate", 4), ("poet", 19))
    }
    named = ("--adapters", ",".join(f"{name}={folder}" for name, folder in adapters.items()))
    with deployment(decode=3, dtype="bfloat16", worker=(*SMALL_KV, *kinds, *named)) as running:
        channel, stub = open_stub(running.address)
        async with channel:
            answer = await ask(stub, generate_request(PROMPT, max_tokens=8))
            assert answer.receipt.handoff_bytes > 0
            assert (await stub.GetModel(GetModelRequest())).quantization == "int4"
            expected = await asyncio.to_thread(alone, adapters)
            assert expected[BASE] == [answer.ids]
            assert len({tuple(output) for outputs in expected.values() for output in outputs}) == 1 + 2 * OUTPUTS
            for name, interrupt, attempts in (("pirate", Process.ask_to_end, 1), ("poet", Process.kill, 2)):
                receipt, outputs = await interrupted(stub, running, name, interrupt)
                assert receipt.attempts == attempts
                assert outputs == expected[name]
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
