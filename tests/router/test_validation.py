from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.request import MAX_LOGPROBS
from decant.protos import inference_pb2 as pb
from decant.router.api.validation import salt_of, validate
from decant.router.limits import (
    MAX_DETACH_TTL_MS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_OUTPUTS,
    MAX_REQUEST_BYTES,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    limits,
)
from decant.router.text.detokenizing.token_table import PromptEnd
from decant.router.text.output_text import OutputOptions
from decant.router.text.served_model import Models
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument, NotFound, Unavailable
from tests.router.factories import context_length, model, tiny, unpacked, valid

Sampling, Stopping = pb.SamplingParams, pb.StoppingParams
DETACH = pb.StreamOptions.ON_DISCONNECT_DETACH


# ------------------------------------------------------------------------------------------------ ranges


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": Sampling(**fields)}


def stopping(**fields: Any) -> dict[str, Any]:
    return {"stopping": Stopping(**fields)}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        *[
            (sampling(**{name: value}), f"sampling.{name}")
            for name, bad in {
                "temperature": (-0.1, 100.5),
                "top_p": (0.0, -0.5, 1.01),
                "min_p": (-0.1, 1.1),
                "frequency_penalty": (-2.1, 2.1),
                "presence_penalty": (-2.1, 2.1),
                "repetition_penalty": (0.0, -1.0, 10.1),
            }.items()
            for value in (*bad, math.nan, math.inf, -math.inf)
        ],
        (sampling(top_k=-1), "sampling.top_k"),
        (sampling(n=0), "sampling.n"),
        (sampling(logit_bias={3: 100.5}), "sampling.logit_bias[3]"),
        (sampling(logit_bias={3: math.nan}), "sampling.logit_bias[3]"),
        (sampling(logit_bias={4096: 1.0}), "sampling.logit_bias"),
        (sampling(logit_bias=dict.fromkeys(range(MAX_LOGIT_BIAS_ENTRIES + 1), 1.0)), "sampling.logit_bias"),
        (stopping(max_tokens=0), "stopping.max_tokens"),
        (stopping(max_tokens=3, min_tokens=4), "stopping.min_tokens"),
        (stopping(min_tokens=2048), "stopping.min_tokens"),
        (stopping(stop_token_ids=[4096]), "stopping.stop_token_ids"),
        (stopping(stop_token_ids=range(MAX_STOP_TOKEN_IDS + 1)), "stopping.stop_token_ids"),
        (stopping(stop=["x"] * (MAX_STOP_STRINGS + 1)), "stopping.stop"),
        (stopping(stop=["x", ""]), "stopping.stop[1]"),
        (stopping(stop=["é" * (MAX_STOP_STRING_BYTES // 2) + "x"]), "stopping.stop[0]"),
        ({"response": pb.ResponseOptions(logprobs=MAX_LOGPROBS + 1)}, "response.logprobs"),
        ({"priority": 1001}, "priority"),
        ({"priority": -1001}, "priority"),
        ({"request_id": "é" * 65}, "request_id"),
        ({"token_ids": pb.TokenIds(ids=[3, 4096])}, "token_ids.ids"),
        ({"stream": pb.StreamOptions(on_disconnect=9)}, "stream.on_disconnect"),  # type: ignore[arg-type]
        ({"stream": pb.StreamOptions(detach_ttl_ms=5)}, "stream.detach_ttl_ms"),
        (
            {"stream": pb.StreamOptions(on_disconnect=DETACH, detach_ttl_ms=MAX_DETACH_TTL_MS + 1)},
            "stream.detach_ttl_ms",
        ),
        ({"user": "x" * MAX_REQUEST_BYTES}, "GenerateRequest"),
        ({"messages": pb.Messages()}, "messages"),
    ],
)
async def test_values_out_of_range_are_refused_by_field_limit_and_value(fields, field):
    with pytest.raises(InvalidArgument) as refused:
        await valid(**fields)
    assert (refused.value.field, refused.value.reason) == (field, Reason.INVALID_FIELD)
    assert refused.value.limit
    assert refused.value.value


@pytest.mark.parametrize(
    "fields",
    [
        sampling(temperature=0, top_p=1, min_p=0, top_k=0, repetition_penalty=1),
        sampling(temperature=100, top_p=1e-6, min_p=1, top_k=2**31 - 1, repetition_penalty=10),
        sampling(frequency_penalty=-2, presence_penalty=2, logit_bias={4095: -100, 0: 100}, seed=2**64 - 1),
        stopping(max_tokens=3, min_tokens=3, stop_token_ids=[4095]),
        stopping(stop=["x" * MAX_STOP_STRING_BYTES] * MAX_STOP_STRINGS),
        {"priority": -1000, "request_id": "é" * 64, "response": pb.ResponseOptions(logprobs=MAX_LOGPROBS)},
    ],
)
async def test_the_bounds_of_every_range_are_accepted(fields):
    assert await valid(**fields)


async def test_an_unknown_model_is_not_found():
    with pytest.raises(NotFound):
        await valid(model="tiny-pythons")
    assert (
        (await valid(model="tiny-python")).engine_request.model == (await valid()).engine_request.model == "tiny-python"
    )


# ------------------------------------------------------------------------------------- prompt and context length


@pytest.mark.parametrize("fields", [{"prompt": ""}, {"token_ids": pb.TokenIds()}])
async def test_an_empty_prompt_is_refused(fields):
    with pytest.raises(InvalidArgument) as refused:
        await valid(**fields)
    assert refused.value.reason is Reason.EMPTY_PROMPT


async def test_a_request_without_any_input_is_refused():
    with pytest.raises(InvalidArgument) as refused:
        await validate(pb.GenerateRequest(), Models([tiny()]), context_length(None), Deadline(), "default")
    assert refused.value.reason is Reason.EMPTY_PROMPT


@pytest.mark.parametrize(("tokens", "fits"), [(15, True), (16, False), (17, False)])
@pytest.mark.parametrize("whose", ["model", "workers"])
async def test_a_prompt_that_fills_the_context_is_refused(tokens, fits, whose):
    limited = {"workers_context_length": 16} if whose == "workers" else {"served": model(max_context_length=16)}
    asked = valid(token_ids=pb.TokenIds(ids=[3] * tokens), **limited)
    if fits:
        assert (await asked).engine_request.stopping.max_tokens == 1
        return
    with pytest.raises(InvalidArgument) as refused:
        await asked
    assert (refused.value.reason, refused.value.value) == (Reason.PROMPT_TOO_LONG, str(tokens))
    assert "15" in refused.value.limit


async def test_the_workers_context_length_overrides_the_models():
    made = await valid(
        served=model(max_context_length=16), workers_context_length=64, token_ids=pb.TokenIds(ids=[3] * 40)
    )
    assert made.engine_request.stopping.max_tokens == 24


async def test_without_workers_the_context_length_may_be_unknown():
    with pytest.raises(Unavailable) as refused:
        await valid(served=model(max_context_length=None))
    assert refused.value.reason is Reason.NO_WORKER
    assert (
        await valid(served=model(max_context_length=None), workers_context_length=64)
    ).engine_request.stopping.max_tokens < 64


@pytest.mark.rule("fits-context", "router/api/validation.py:_stopping", "router/text/prompt.py:check_fits")
@pytest.mark.slow
@given(
    prompt=st.integers(1, 20),
    limit=st.integers(2, 24),
    max_tokens=st.none() | st.integers(1, 30),
    min_tokens=st.integers(0, 30),
)
@settings(max_examples=300, deadline=None)
async def test_prompt_and_output_always_fit_the_context(prompt, limit, max_tokens, min_tokens):
    stopping = Stopping(max_tokens=max_tokens, min_tokens=min_tokens)
    try:
        made = await valid(token_ids=pb.TokenIds(ids=[3] * prompt), stopping=stopping, workers_context_length=limit)
    except InvalidArgument:
        assert prompt >= limit or min_tokens > min(max_tokens or limit, limit - prompt)
        return
    stop = made.engine_request.stopping
    assert made.prompt_tokens == prompt
    assert 1 <= stop.max_tokens <= limit - prompt
    assert stop.min_tokens == min_tokens <= stop.max_tokens
    assert stop.capped_by_context_length == (max_tokens is None or prompt + max_tokens > limit)
    assert stop.max_tokens == (limit - prompt if stop.capped_by_context_length else max_tokens)


async def test_a_prompt_has_its_special_tokens_and_tokens_are_taken_as_they_are():
    ids = await tiny().encode("x = 1", special=False)
    assert unpacked((await valid(prompt="x = 1")).engine_request.prompt) == [0, *ids]
    assert unpacked((await valid(token_ids=pb.TokenIds(ids=ids))).engine_request.prompt) == ids


async def test_token_ids_beyond_the_models_embeddings_are_refused():
    with pytest.raises(InvalidArgument) as refused:
        await valid(prompt="return None", served=model(vocab_size=50))
    assert refused.value.field == "prompt"


# ----------------------------------------------------------------------------------- what is left unset


async def test_unset_sampling_is_the_models_own():
    own = pb.SamplingParams(temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, repetition_penalty=1.5, n=1)
    made = (await valid(served=model(default_sampling=own))).engine_request.sampling
    assert (made.temperature, made.top_p, made.top_k, made.min_p, made.repetition_penalty) == (0.5, 0.25, 9, 0.125, 1.5)
    asked = Sampling(temperature=0, top_k=0)
    made = (await valid(served=model(default_sampling=own), sampling=asked)).engine_request.sampling
    assert (made.temperature, made.top_k, made.top_p) == (0, 0, 0.25)


async def test_a_request_does_not_change_the_models_own_sampling():
    before = tiny().default_sampling.SerializeToString(deterministic=True)
    await valid(sampling=Sampling(temperature=3, seed=3, logit_bias={3: 1}))
    assert tiny().default_sampling.SerializeToString(deterministic=True) == before
    assert not (await valid()).engine_request.sampling.logit_bias


async def test_an_unset_seed_is_drawn_from_all_that_there_are():
    seeds = {(await valid()).engine_request.sampling.seed for _ in range(64)}
    assert len(seeds) == 64
    assert max(seeds) > 2**60
    assert (await valid(sampling=Sampling(seed=0))).engine_request.sampling.seed == 0


async def test_an_empty_id_is_generated_and_a_given_one_is_kept():
    made, other = await valid(), await valid()
    assert made.id_generated
    assert made.key.id != other.key.id
    assert made.payload.request_id == made.key.id
    given = await valid(request_id="mine")
    assert (given.key.id, given.id_generated, given.payload.request_id) == ("mine", False, "mine")


async def test_output_options_follow_the_request():
    assert (await valid()).output_options == OutputOptions(after=PromptEnd())
    asked = pb.ResponseOptions(text=False, token_ids=True, logprobs=0, skip_special_tokens=False)
    made = await valid(response=asked)
    assert made.output_options == OutputOptions(
        text=False, token_ids=True, logprobs=0, skip_special_tokens=False, after=PromptEnd()
    )
    assert made.engine_request.HasField("logprobs")
    assert not (await valid()).engine_request.HasField("logprobs")


async def test_one_output_is_to_be_written():
    outputs = (await valid()).engine_request.outputs
    assert [(output.output, output.tokens) for output in outputs] == [(0, b"")]


async def test_stop_tokens_are_named_once():
    assert list((await valid(**stopping(stop_token_ids=[9, 3, 9]))).engine_request.stopping.stop_token_ids) == [3, 9]


def test_salts_differ_by_tenant_and_by_the_clients_own():
    pairs = [("a", ""), ("b", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("", "")]
    assert len({salt_of(*pair) for pair in pairs}) == len(pairs)
    assert salt_of("a", "b") == salt_of("a", "b")


def test_reported_limits_are_those_that_are_enforced():
    values = limits(max_queued_requests=5, resume_grace_ms=6, result_ttl_ms=7)
    assert (values.max_queued_requests, values.resume_grace_ms, values.result_ttl_ms) == (5, 6, 7)
    assert values.max_logprobs == MAX_LOGPROBS
    assert values.max_outputs == MAX_OUTPUTS
    assert (values.max_stop_strings, values.max_stop_string_bytes) == (MAX_STOP_STRINGS, MAX_STOP_STRING_BYTES)
    assert values.max_detach_ttl_ms == MAX_DETACH_TTL_MS
