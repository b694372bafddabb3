from __future__ import annotations

import asyncio

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import generate_request
from tests.e2e.deployment import PATIENCE_S, Deployment
from tests.e2e.metrics_page import Totals, read_totals

pytestmark = pytest.mark.slow

LONG = "def total(values):\n    result = 0\n" * 12
SAMPLINGS = {
    "random": pb.SamplingParams(temperature=1.0, seed=7),
    "penalised": pb.SamplingParams(temperature=0.9, seed=8, frequency_penalty=0.7, repetition_penalty=1.2),
}


def request_for(outputs: int, prompt: str, sampling: pb.SamplingParams) -> pb.GenerateRequest:
    request = generate_request(prompt, sampling=sampling, max_tokens=30)
    request.sampling.n = outputs
    request.stopping.stop.append("\n")
    request.stopping.min_tokens = 2
    request.response.logprobs = 1
    return request


@pytest.mark.parametrize("prompt", ["x", LONG], ids=["one worker", "split"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
async def test_output_i_is_the_last_of_a_request_with_i_plus_1_outputs(
    stub: InferenceServiceStub, pair: Deployment, sampling: pb.SamplingParams, prompt: str
) -> None:
    whole = await stub.Generate(request_for(4, prompt, sampling), timeout=PATIENCE_S)
    assert [output.index for output in whole.outputs] == [0, 1, 2, 3]
    assert len({tuple(output.token_ids) for output in whole.outputs}) > 1
    assert whole.usage.completion_tokens == sum(len(output.token_ids) for output in whole.outputs)
    for outputs in (1, 2, 3):
        fewer = await stub.Generate(request_for(outputs, prompt, sampling), timeout=PATIENCE_S)
        assert list(fewer.outputs) == list(whole.outputs)[:outputs], "text, tokens, log-probabilities and ends"
    await asyncio.to_thread(pair.settled)


async def test_the_prompt_is_computed_and_handed_over_once(stub: InferenceServiceStub, pair: Deployment) -> None:
    request = request_for(5, "# once\n" + LONG, SAMPLINGS["random"])
    request.cache.bypass_prefix_cache = True
    before = await counted(pair)
    answer = await stub.Generate(request, timeout=PATIENCE_S)
    await asyncio.to_thread(pair.settled)
    after = await counted(pair)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["decant_handoff_seconds"] == 1
    assert answer.receipt.handoff_bytes > 0
    prompt = answer.usage.prompt_tokens
    assert prompt > 100
    assert grown["decant_prompt_tokens_total"] == 2 * prompt, (
        "computed once by one worker, handed over once to the other"
    )


async def counted(pair: Deployment) -> Totals:
    ports = [worker.process.until("serving")["admin_port"] for worker in pair.workers]
    pages = [await asyncio.to_thread(read_totals, port) for port in ports]
    return {name: sum(page.get(name, 0.0) for page in pages) for name in pages[0]}
