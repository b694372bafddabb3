from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from decant import models
from decant.engine.request import SamplingParams
from decant.protos import inference_pb2 as pb
from decant.router.api.validation import UNIMPLEMENTED_FIELDS
from decant.runtime.errors import from_call
from tests.e2e import conversation_fields, guide_fields  # noqa: F401 - they add their checks
from tests.e2e.checkpoints import chat_model
from tests.e2e.client_checks import ask, generate_request, open_stub, run_alone
from tests.e2e.deployment import PATIENCE_S, SMALL_KV, Deployment, deployment
from tests.e2e.field_checks import CHAT, CHECKS, IDS, PROMPT, WRITTEN, Check, Stub, field, plain, request
from tests.e2e.metrics_page import until_metric
from tests.engine import peft_adapters

pytestmark = pytest.mark.slow

LONG = 1500
DETACHED = 100
"""Tokens of an answer that is written to its end without a client."""
BEGIN, END = 0, 1
ADAPTER = "pirate"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = chat_model(tmp_path_factory.mktemp("models") / CHAT)
    adapter = peft_adapters.for_model(tmp_path_factory.mktemp("adapters") / ADAPTER, models.path())
    router = ("--resume-grace-ms", "0", "--max-active", "1")
    worker = (*SMALL_KV, "--adapters", f"{ADAPTER}={adapter}")
    with deployment(router=router, worker=worker, another=f"{CHAT}={folder}") as made:
        yield made


@pytest.fixture
async def stub(running: Deployment) -> AsyncIterator[Stub]:
    channel, made = open_stub(running.address)
    async with channel:
        yield made


def leaves(descriptor: Any) -> Iterator[str]:
    for each in descriptor.fields:
        if each.message_type is None or each.message_type.GetOptions().map_entry:
            yield f"{descriptor.name}.{each.name}"
        else:
            yield from leaves(each.message_type)


def test_every_field_has_a_check() -> None:
    assert not UNIMPLEMENTED_FIELDS
    every = set(leaves(pb.GenerateRequest.DESCRIPTOR))
    assert every == CHECKS.keys() | {"GenerateRequest.user", "GenerateRequest.priority"}


# ------------------------------------------------------------------------------------------ the request itself


@field("GenerateRequest.request_id")
async def _request_id(stub: Stub) -> None:
    id = str(uuid.uuid4())
    call = stub.GenerateStream(request(request_id=id), timeout=PATIENCE_S)
    assert {message.request_id async for message in call} == {id}
    stored = await stub.GetGeneration(pb.GetGenerationRequest(request_id=id))
    assert (stored.request_id, stored.state) == (id, pb.Generation.STATE_SUCCEEDED)


@field("GenerateRequest.model")
async def _model(stub: Stub) -> None:
    for model in ("tiny-python", CHAT):
        answer = await ask(stub, request(model=model))
        assert answer.started.model == model
        assert bool(answer.receipt.prefill_worker) == (model != CHAT), "the second model has a decode worker alone"


@field("GenerateRequest.lora_name")
async def _lora_name(stub: Stub) -> None:
    listed = await stub.ListModels(pb.ListModelsRequest(), timeout=PATIENCE_S)
    assert [(adapter.name, adapter.rank) for adapter in listed.models[0].adapters] == [(ADAPTER, 4)]
    base, adapted = await plain(stub), await ask(stub, request(lora_name=ADAPTER))
    assert adapted.ids != base.ids
    again = await ask(stub, request(model=ADAPTER))
    assert (again.ids, again.started.model) == (adapted.ids, "tiny-python")
    assert (await plain(stub)).ids == base.ids, "its blocks are not those of the base"
    for model, lora_name in ("", ADAPTER), (ADAPTER, ""), ("", ""):
        scored = pb.ScoreRequest(prompt=PROMPT, model=model, lora_name=lora_name)
        scored.continuations.add().token_ids.ids.extend(adapted.ids)
        (score,) = (await stub.Score(scored, timeout=PATIENCE_S)).scores
        assert all(token.rank == 1 for token in score.tokens) == bool(model or lora_name)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(request(lora_name="absent"), timeout=PATIENCE_S)
    assert str(from_call(refused.value)) == f"adapter: one of {ADAPTER}, got absent"


@field("GenerateRequest.prompt", "TokenIds.ids")
async def _prompt(stub: Stub) -> None:
    answer = await plain(stub)
    assert answer.started.prompt_tokens == len(IDS)
    same = await ask(stub, generate_request(IDS, max_tokens=WRITTEN))
    assert (same.ids, same.text) == (answer.ids, answer.text)
    assert answer.ids == [token.token for token in run_alone("float32", IDS, SamplingParams(), WRITTEN)]


async def test_waiting_requests_begin_by_priority(running: Deployment, stub: Stub) -> None:
    first = stub.GenerateStream(request(stopping=pb.StoppingParams(max_tokens=LONG, ignore_eos=True)))
    await first.read()  # it has the one place
    ids = {priority: str(uuid.uuid4()) for priority in (-1000, 0, 1000)}
    waiting = [
        asyncio.create_task(ask(stub, request(priority=priority, request_id=id))) for priority, id in ids.items()
    ]
    port = running.routers[0].until("serving")["admin_port"]
    await until_metric(port, "decant_requests_waiting", lambda count: count == len(ids))
    first.cancel()
    await asyncio.gather(*waiting)

    async def began(priority: int) -> int:
        generation = await stub.GetGeneration(pb.GetGenerationRequest(request_id=ids[priority]))
        queued = pb.Generation.STATE_QUEUED
        return min(int(one.time.ToNanoseconds()) for one in generation.transitions if one.state != queued)

    times = [await began(priority) for priority in (1000, 0, -1000)]
    assert times == sorted(times)


async def test_the_user_is_logged_and_changes_nothing(running: Deployment, stub: Stub) -> None:
    assert (await ask(stub, request(user="somebody"))).ids == (await plain(stub)).ids
    await asyncio.to_thread(running.routers[0].until, "request ended", user="somebody")


@field("CacheOptions.session_id")
async def _session(stub: Stub) -> None:
    hinted = await ask(stub, request(cache=pb.CacheOptions(session_id="s")))
    assert hinted.ids == (await plain(stub)).ids


# -------------------------------------------------------------------------------------------------- sampling


def sampled(name: str, value: float) -> None:
    @field(f"SamplingParams.{name}")
    async def check(stub: Stub) -> None:
        def settings(**more: Any) -> dict[str, Any]:
            return {"temperature": 1.5, "seed": 77} | more

        async def drawn(**chosen: Any) -> list[int]:
            made = request(stopping=pb.StoppingParams(ignore_eos=True))
            made.sampling.CopyFrom(pb.SamplingParams(**chosen))
            return (await ask(stub, made)).ids

        changed = settings(**{name: value})
        parameters = pb.SamplingParams(**changed)
        exact = {each.name: getattr(parameters, each.name) for each, _ in parameters.ListFields()}  # floats of 32 bits
        expected = run_alone("float32", IDS, SamplingParams(**exact), WRITTEN)
        ids = await drawn(**changed)
        assert ids[: len(expected)] == [token.token for token in expected]
        assert ids != await drawn(**settings())


sampled("temperature", 0.5)
sampled("top_p", 0.2)
sampled("top_k", 2)
sampled("min_p", 0.5)
sampled("frequency_penalty", 2.0)
sampled("presence_penalty", 2.0)
sampled("repetition_penalty", 3.0)
sampled("seed", 78)


@field("SamplingParams.n", "SamplingParams.best_of")
async def check_outputs(stub: Stub) -> None:
    several = pb.SamplingParams(n=3, temperature=1.0, seed=3)
    answer = await stub.Generate(request(sampling=several), timeout=PATIENCE_S)
    assert len({tuple(output.token_ids) for output in answer.outputs}) == 3
    several.n, several.best_of = 1, 3
    best = await stub.Generate(request(sampling=several), timeout=PATIENCE_S)
    assert best.outputs[0].token_ids in [output.token_ids for output in answer.outputs]
    assert len(best.outputs) == 1
    assert best.usage.completion_tokens == answer.usage.completion_tokens


@field("SamplingParams.logit_bias", "StoppingParams.max_tokens")
async def _bias(stub: Stub) -> None:
    answer = await ask(stub, request(sampling=pb.SamplingParams(logit_bias={7: 100.0}), stopping=_most(5)))
    assert answer.ids == [7] * 5
    assert answer.finished.finish_reason == pb.FINISH_REASON_LENGTH


def _most(tokens: int) -> pb.StoppingParams:
    return pb.StoppingParams(max_tokens=tokens)


# -------------------------------------------------------------------------------------------------- stopping


@field("StoppingParams.stop_token_ids", "StoppingParams.min_tokens")
async def _stop_tokens(stub: Stub) -> None:
    whole = await plain(stub)
    stop = whole.ids[6]
    first = whole.ids.index(stop)
    answer = await ask(stub, request(stopping=pb.StoppingParams(stop_token_ids=[stop])))
    assert answer.ids == whole.ids[: first + 1]
    assert answer.finished == pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_token_id=stop)
    late = await ask(stub, request(stopping=pb.StoppingParams(stop_token_ids=[stop], min_tokens=first + 2)))
    assert len(late.ids) >= first + 2
    assert stop not in late.ids[: first + 1], "it is not even drawn"


@field("StoppingParams.stop", "StoppingParams.include_stop_in_output")
async def _stop_strings(stub: Stub) -> None:
    whole = await plain(stub)
    stop = whole.text[len(whole.text) // 2 :][:4]
    start = whole.text.index(stop)
    for include in (False, True):
        stopping = pb.StoppingParams(stop=[stop], include_stop_in_output=include)
        answer = await ask(stub, request(stopping=stopping))
        assert answer.text == whole.text[: start + len(stop) * include]
        assert answer.finished == pb.Finished(finish_reason=pb.FINISH_REASON_STOP, stop_string=stop)


@field("StoppingParams.ignore_eos")
async def _eos(stub: Stub) -> None:
    bias = pb.SamplingParams(logit_bias={END: 100.0})
    ended = await ask(stub, request(sampling=bias))
    assert ended.finished == pb.Finished(finish_reason=pb.FINISH_REASON_STOP, eos_token_id=END)
    assert ended.ids == [END]
    on = await ask(stub, request(sampling=bias, stopping=pb.StoppingParams(ignore_eos=True)))
    assert on.ids == [END] * WRITTEN


# -------------------------------------------------------------------------------------------------- response


@field("ResponseOptions.text", "ResponseOptions.token_ids", "ResponseOptions.echo")
async def _shown(stub: Stub) -> None:
    whole = await plain(stub)
    silent = await ask(stub, request(response=pb.ResponseOptions(text=False)))
    assert (silent.text, silent.ids) == ("", whole.ids)
    words = request(response=pb.ResponseOptions(echo=True))
    words.response.token_ids = False
    answer = await ask(stub, words)
    assert (answer.text, answer.ids) == (PROMPT + whole.text, [])


@field("ResponseOptions.logprobs", "ResponseOptions.prompt_logprobs")
async def _logprobs(stub: Stub) -> None:
    answer = await ask(stub, request(response=pb.ResponseOptions(logprobs=2, prompt_logprobs=3)))
    assert [entry.token_id for entry in answer.logprobs] == answer.ids
    assert all(entry.rank == 1 and len(entry.top) == 2 for entry in answer.logprobs), "greedy takes the likeliest"
    assert [entry.token_id for entry in answer.started.prompt_logprobs] == IDS
    assert all(len(entry.top) == 3 for entry in answer.started.prompt_logprobs[1:])


@field("ResponseOptions.skip_special_tokens")
async def _special(stub: Stub) -> None:
    bias = pb.SamplingParams(logit_bias={BEGIN: 100.0})
    for skip, text in ((True, ""), (False, "<|begin|>" * 3)):
        response = pb.ResponseOptions(skip_special_tokens=skip)
        answer = await ask(stub, request(sampling=bias, response=response, stopping=_most(3)))
        assert (answer.text, answer.ids) == (text, [BEGIN] * 3)


# ------------------------------------------------------------------------------------------- cache and stream


@field("CacheOptions.bypass_prefix_cache", "CacheOptions.cache_salt")
async def _cache(stub: Stub) -> None:
    long = generate_request([BEGIN, *(9 + n * 31 % 4000 for n in range(70))], max_tokens=2)

    async def found(**options: Any) -> int:
        made = pb.GenerateRequest()
        made.CopyFrom(long)
        made.cache.CopyFrom(pb.CacheOptions(**options))
        return (await ask(stub, made)).started.cached_tokens

    salt = uuid.uuid4().hex
    assert await found(cache_salt=salt) == 0
    assert await found(cache_salt=salt) >= 64
    assert await found(cache_salt=uuid.uuid4().hex) == 0
    assert await found(cache_salt=salt, bypass_prefix_cache=True) == 0


@field("StreamOptions.on_disconnect", "StreamOptions.detach_ttl_ms")
async def _disconnect(stub: Stub) -> None:
    detach = pb.StreamOptions.ON_DISCONNECT_DETACH
    ends: dict[Any, tuple[int, list[pb.StreamOptions]]] = {
        pb.Generation.STATE_CANCELLED: (
            LONG,
            [
                pb.StreamOptions(),
                pb.StreamOptions(on_disconnect=pb.StreamOptions.ON_DISCONNECT_CANCEL),
                pb.StreamOptions(on_disconnect=detach, detach_ttl_ms=1),
            ],
        ),
        pb.Generation.STATE_SUCCEEDED: (
            DETACHED,
            [
                pb.StreamOptions(on_disconnect=detach),
                pb.StreamOptions(on_disconnect=detach, detach_ttl_ms=600_000),
            ],
        ),
    }
    for state, (tokens, options) in ends.items():
        for stream in options:
            id = str(uuid.uuid4())
            stopping = pb.StoppingParams(max_tokens=tokens, ignore_eos=True)
            call = stub.GenerateStream(request(request_id=id, stopping=stopping, stream=stream))
            await call.read()
            call.cancel()
            assert await _ended(stub, id) == state


async def _ended(stub: Stub, id: str) -> int:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            generation = await stub.GetGeneration(pb.GetGenerationRequest(request_id=id))
            if generation.state >= pb.Generation.STATE_SUCCEEDED:
                return int(generation.state)
            await asyncio.sleep(0.05)


@field("StreamOptions.min_chunk_tokens")
async def _chunks(stub: Stub) -> None:
    made = request(stream=pb.StreamOptions(min_chunk_tokens=10), stopping=pb.StoppingParams(ignore_eos=True))
    call = stub.GenerateStream(made, timeout=PATIENCE_S)
    sizes = [message.delta.num_tokens async for message in call if message.HasField("delta")]
    assert sum(sizes) == WRITTEN
    assert min(sizes[:-1]) >= 10


@pytest.mark.parametrize("check", dict.fromkeys(CHECKS.values()), ids=lambda check: check.__name__)
async def test_every_field_has_its_documented_effect(stub: Stub, check: Check) -> None:
    await check(stub)
