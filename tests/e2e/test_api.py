import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.inference_pb2_grpc import InferenceServiceStub
from tests.e2e.client_checks import Answer, ask, generate_request
from tests.e2e.deployment import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT = "def add(a, b):\n"


async def plain(stub: InferenceServiceStub) -> Answer:
    return await ask(stub, generate_request(PROMPT, max_tokens=40))


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_an_output_within_its_tokens(stub: InferenceServiceStub, include: bool) -> None:
    whole = await plain(stub)
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + 5]
    request = generate_request(PROMPT, max_tokens=40)
    request.stopping.stop.extend(["never\x00", stop])
    request.stopping.include_stop_in_output = include
    answer = await ask(stub, request)
    start = whole.text.index(stop)
    assert answer.text == whole.text[: start + len(stop) if include else start]
    assert answer.finished == pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_string=stop)
    assert answer.ids == whole.ids[: len(answer.ids)]
    assert answer.usage.completion_tokens == len(answer.ids) < len(whole.ids)
    request.stopping.min_tokens = 40
    late = await ask(stub, request)
    assert len(late.ids) == 40


async def test_the_prompt_is_shown_with_what_the_model_makes_of_it(stub: InferenceServiceStub) -> None:
    whole = await plain(stub)
    request = generate_request(PROMPT, max_tokens=40)
    request.response.echo = True
    request.response.prompt_logprobs = 2
    answer = await ask(stub, request)
    assert answer.text == PROMPT + whole.text
    assert answer.ids == whole.ids
    first, *others = answer.started.prompt_logprobs
    assert len(others) + 1 == answer.started.prompt_tokens
    assert answer.started.cached_tokens == 0
    assert not first.HasField("logprob")
    assert all(entry.logprob <= 0 and entry.rank >= 1 and len(entry.top) == 2 for entry in others)
    assert all(entry.top[entry.rank - 1].token_id == entry.token_id for entry in others if entry.rank <= 2)
    assert b"".join(entry.raw_bytes for entry in answer.started.prompt_logprobs).endswith(PROMPT.encode())


async def test_deltas_are_as_large_as_was_asked_for(stub: InferenceServiceStub) -> None:
    request = generate_request(PROMPT, max_tokens=40)
    request.stopping.ignore_eos = True
    request.stream.min_chunk_tokens = 15
    sizes = [
        message.delta.num_tokens
        async for message in stub.GenerateStream(request, timeout=PATIENCE_S)
        if message.HasField("delta")
    ]
    assert sum(sizes) == 40
    assert min(sizes[:-1]) >= 15
