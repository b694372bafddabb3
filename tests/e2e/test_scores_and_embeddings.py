"""`Score` and `Embed` through processes with the trained model."""

from __future__ import annotations

import asyncio
import math

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from decant import Client, models
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.protos.vllm import vllm_engine_pb2_grpc
from tests.e2e.client_checks import TOKENIZER, generate_request
from tests.e2e.deployment import PATIENCE_S, Deployment
from tests.e2e.metrics_page import read_page

pytestmark = pytest.mark.slow

BLOCK = 16
LONG = "# scored\n" + "def total(values):\n    result = 0\n" * 12


async def test_the_scores_of_generated_tokens_are_their_logprobs(stub: InferenceServiceStub, pair: Deployment) -> None:
    request = generate_request(LONG, sampling=pb.SamplingParams(temperature=1.0, seed=3, n=6), max_tokens=24)
    request.response.logprobs = 2
    answer = await stub.Generate(request, timeout=PATIENCE_S)
    outputs = [list(output.token_ids) for output in answer.outputs]
    continuations = [pb.Continuation(token_ids=pb.TokenIds(ids=ids)) for ids in outputs]
    scored = pb.ScoreRequest(prompt=LONG, continuations=continuations, logprobs=2)
    response = await stub.Score(scored, timeout=PATIENCE_S)
    for output, score in zip(answer.outputs, response.scores, strict=True):
        assert list(score.tokens) == list(output.logprobs), "the same bits, ranks, texts and alternatives"
        assert score.logprob == math.fsum(token.logprob for token in score.tokens)
    assert response.usage.prompt_tokens == answer.usage.prompt_tokens + sum(map(len, outputs))
    await asyncio.to_thread(pair.settled)


async def test_the_prompt_of_a_score_is_computed_once_and_by_the_prefill_worker(
    stub: InferenceServiceStub, pair: Deployment
) -> None:
    prompt = "# once for all\n" + LONG
    words = [" x", "\n", "return", "def f(a):", " = 5", "):"]
    continuations = [pb.Continuation(token_ids=pb.TokenIds(ids=TOKENIZER.encode(word).ids)) for word in words]
    before = await computed_tokens(pair)
    response = await stub.Score(pb.ScoreRequest(prompt=prompt, continuations=continuations), timeout=PATIENCE_S)
    await asyncio.to_thread(pair.settled)
    prefill, decode = (after - was for after, was in zip(await computed_tokens(pair), before, strict=True))
    count = len(TOKENIZER.encode(prompt).ids)
    tails = sum(len(item.token_ids.ids) for item in continuations)
    most = count + tails + len(words) * BLOCK  # of each, the tokens behind the last full block are its own
    assert count + tails <= prefill <= most < 2 * count
    assert decode == 0
    assert response.usage.prompt_tokens == count + tails


async def computed_tokens(pair: Deployment) -> list[float]:
    """Prompt tokens that the prefill worker and the decode worker have computed."""
    pages = [
        await asyncio.to_thread(read_page, worker.process.until("serving")["admin_port"], "/metrics")
        for worker in sorted(pair.workers, key=lambda worker: "decode" in worker.process.module)
    ]
    series = 'decant_prompt_tokens_total{source="local_compute"} '
    return [float(line.removeprefix(series)) for page in pages for line in page.splitlines() if line.startswith(series)]


async def test_embeddings_are_the_models_hidden_states_in_both_protocols(pair: Deployment) -> None:
    texts = ["def add(a, b):", "import os\n"]
    with Client(pair.address) as client:
        last = await asyncio.to_thread(client.embed, texts, timeout=PATIENCE_S)
        mean = await asyncio.to_thread(client.embed, texts, pooling="mean", dimensions=16, timeout=PATIENCE_S)
    model = AutoModelForCausalLM.from_pretrained(models.path(), dtype=torch.float32).eval()
    for text, of_last, of_mean in zip(texts, last.embeddings, mean.embeddings, strict=True):
        with torch.no_grad():
            hidden = model.base_model(input_ids=torch.tensor([TOKENIZER.encode(text).ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden[-1], dim=0)
        assert torch.cosine_similarity(expected, torch.tensor(of_last.values), dim=0) > 0.999
        expected = torch.nn.functional.normalize(hidden.mean(0)[:16], dim=0)
        assert torch.cosine_similarity(expected, torch.tensor(of_mean.values), dim=0) > 0.999
    async with grpc.aio.insecure_channel(pair.address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        tokenized = vllm.TokenizedInput(input_ids=TOKENIZER.encode(texts[0]).ids)
        response = await stub.Embed(vllm.EmbedRequest(tokenized=tokenized), timeout=PATIENCE_S)
    assert list(response.embedding) == list(last.embeddings[0].values)
