import asyncio
from typing import Any

import pytest

from decant.engine.request import SamplingParams
from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import END, TOKENIZER, Answer, ask, check_generated, generate_request, open_stub, run_alone
from tests.e2e.deployment import Deployment, deployment

pytestmark = pytest.mark.slow

PROMPTS = (
    "def read_lines(path):\n",
    "import os\n\n\nclass Stack:\n    def push(self, item):\n",
    "for key, value in ",
    "#",
    'raise ValueError("',
)
CONTEXT_LENGTH = 2048


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text).ids


def counted(answer: Answer, prompt: int, output: int) -> None:
    assert answer.started.prompt_tokens == answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == len(answer.ids) == output
    assert answer.usage.total_tokens == prompt + output
    receipt = answer.receipt
    assert receipt.attempts == 1
    assert receipt.queue_ms + receipt.prefill_ms <= receipt.ttft_ms + 1 <= receipt.e2e_ms + 1


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_text_equals_transformers_generate(stub: InferenceServiceStub, prompt: str) -> None:
    ids = ids_of(prompt)
    answer = await ask(stub, generate_request(prompt, max_tokens=48))
    check_generated(ids, answer.ids, 48)
    assert answer.text == TOKENIZER.decode(answer.ids)
    counted(answer, len(ids), len(answer.ids))
    assert answer.receipt.prefill_worker.startswith("prefill")
    assert answer.receipt.decode_worker.startswith("decode")
    assert answer.receipt.handoff_bytes > 0 or answer.usage.cached_prompt_tokens


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 500, 1025, CONTEXT_LENGTH - 2, CONTEXT_LENGTH - 1])
async def test_prompts_of_every_length_are_served(stub: InferenceServiceStub, length: int) -> None:
    source = ids_of("\n\n".join(PROMPTS) * 200)
    start = length % 97  # another prefix for each, so that no cached one shortens the way
    ids = [0, *source[start : start + length - 1]]
    assert len(ids) == length
    answer = await ask(stub, generate_request(ids, max_tokens=20))
    check_generated(ids, answer.ids, min(20, CONTEXT_LENGTH - length))
    ended = answer.ids[-1] == END
    cut = CONTEXT_LENGTH - length < 20
    reason = pb.FINISH_REASON_STOP if ended else pb.FINISH_REASON_CONTEXT_LENGTH if cut else pb.FINISH_REASON_LENGTH
    assert answer.finished.finish_reason == reason
    counted(answer, length, len(answer.ids))


async def test_one_token_needs_no_decode_worker(stub: InferenceServiceStub) -> None:
    answer = await ask(stub, generate_request(PROMPTS[0], max_tokens=1))
    check_generated(ids_of(PROMPTS[0]), answer.ids, 1)
    assert answer.receipt.decode_worker == ""
    assert answer.receipt.handoff_bytes == 0
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH


async def test_sixty_four_concurrent_requests_are_served(pair: Deployment, stub: InferenceServiceStub) -> None:
    prompts = [f"{PROMPTS[index % len(PROMPTS)]}# {index}\n" for index in range(64)]
    limits = [8 + index % 23 for index in range(64)]
    answers = await asyncio.gather(
        *(ask(stub, generate_request(prompt, max_tokens=limit)) for prompt, limit in zip(prompts, limits, strict=True))
    )
    for prompt, limit, answer in zip(prompts, limits, answers, strict=True):
        check_generated(ids_of(prompt), answer.ids, limit)
    await asyncio.to_thread(pair.settled)


@pytest.mark.parametrize(("prefill", "decode"), [(2, 2), (1, 3)])
async def test_every_size_of_the_pools_gives_the_same_text(prefill: int, decode: int) -> None:
    def shape() -> Any:
        return deployment(prefill=prefill, decode=decode)

    context = shape()
    running = await asyncio.to_thread(context.__enter__)
    try:
        channel, stub = open_stub(running.address)
        async with channel:
            prompts = [f"{PROMPTS[index % len(PROMPTS)]}# {index}\n" for index in range(24)]
            answers = await asyncio.gather(*(ask(stub, generate_request(prompt, max_tokens=12)) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            check_generated(ids_of(prompt), answer.ids, 12)
        assert len({answer.receipt.prefill_worker for answer in answers}) == prefill
        assert len({answer.receipt.decode_worker for answer in answers}) == decode
        await asyncio.to_thread(running.settled)
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


SEEDED = pb.SamplingParams(
    temperature=0.9, top_p=0.95, top_k=50, min_p=0.01, seed=2**63 + 11, repetition_penalty=1.1, presence_penalty=0.3
)
SEEDED_HERE = SamplingParams(
    temperature=SEEDED.temperature,
    top_p=SEEDED.top_p,
    top_k=50,
    min_p=SEEDED.min_p,
    seed=2**63 + 11,
    repetition_penalty=SEEDED.repetition_penalty,
    presence_penalty=SEEDED.presence_penalty,
)


@pytest.fixture(scope="module")
def half() -> Any:
    with deployment(dtype="bfloat16") as running:
        yield running


@pytest.mark.parametrize("seeded", [False, True])
async def test_bfloat16_text_equals_the_engine_s_own(half: Deployment, seeded: bool) -> None:
    channel, stub = open_stub(half.address)
    async with channel:
        requests = []
        for prompt in PROMPTS:
            request = generate_request(prompt, sampling=SEEDED if seeded else None, max_tokens=40)
            request.response.logprobs = 3
            requests.append(request)
        answers = await asyncio.gather(*(ask(stub, request) for request in requests))
    sampling = SEEDED_HERE if seeded else SamplingParams()
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = run_alone("bfloat16", ids_of(prompt), sampling, 40, logprobs=3)
        assert answer.ids == [token.token for token in expected]
        for got, token in zip(answer.logprobs, expected, strict=True):
            assert token.logprobs is not None
            assert (got.token_id, got.rank) == (token.token, token.logprobs.rank)
            as_float32 = pb.TopLogprob(logprob=token.logprobs.logprob).logprob
            assert got.logprob == as_float32
            assert [top.token_id for top in got.top] == [other for other, _ in token.logprobs.top]
        if seeded:
            assert answer.started.seed == 2**63 + 11


async def test_multibyte_characters_are_never_split(stub: InferenceServiceStub) -> None:
    text = "# Grüße, 世界 👩‍👩‍👧 — наука\n" * 3
    ids = ids_of(text)
    for seed in range(6):
        sampling = pb.SamplingParams(temperature=1.6, seed=seed, logit_bias=dict.fromkeys(set(ids), 4.0))
        answer = await ask(stub, generate_request(text, sampling=sampling, max_tokens=60))
        assert answer.text == TOKENIZER.decode(answer.ids)
        assert answer.deltas <= len(answer.ids) + 1


async def test_a_unary_answer_equals_the_joined_stream(stub: InferenceServiceStub) -> None:
    request = generate_request(PROMPTS[1], max_tokens=24)
    request.response.logprobs = 2
    whole = await stub.Generate(request)
    answer = await ask(stub, request)
    (output,) = whole.outputs
    assert (output.text, list(output.token_ids)) == (answer.text, answer.ids)
    assert output.finished == answer.finished
    assert [one.logprob for one in output.logprobs] == [one.logprob for one in answer.logprobs]
    assert whole.usage.completion_tokens == answer.usage.completion_tokens
