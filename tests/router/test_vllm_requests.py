from __future__ import annotations

from typing import Any

import pytest

from decant.protos import inference_pb2 as pb
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.vllm.metadata import FAIRNESS_ID, MODEL, OBJECTIVE, TTL, CallMetadata, call_metadata
from decant.router.vllm.requests import generate_request, vllm_field_names
from decant.runtime.errors import InvalidArgument, Unimplemented
from tests.router.factories import valid

NO_METADATA = CallMetadata()
OFF = pb.SamplingParams(
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    repetition_penalty=1.0,
    n=1,
)
WITHOUT_EFFECT = {
    "spaces_between_special_tokens",  # of text, and the response has token ids alone
    "grammar_from_first_token",  # where constraints always start
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.25,
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.5,
    "max_tokens": 7,
    "min_tokens": 2,
    "stop": ["x"],
    "stop_token_ids": [5],
    "skip_special_tokens": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 2,
    "prompt_logprobs": 0,
    "seed": -1,
    "include_stop_str_in_output": True,
    "logit_bias": {7: -1.0},
    "json_schema": "{}",
    "regex": "a",
    "grammar": "root ::= 'a'",
    "structural_tag": "{}",
    "json_object": True,
    "choice": vllm.ChoiceConstraint(choices=["a"]),
}
REFUSED: dict[str, dict[str, Any]] = {
    "kv_transfer_params": {"kv_transfer_params": vllm.KvTransferParams(remote_port=1)},
    "kv_transfer_params_json": {"kv_transfer_params_json": "{}"},
    "mm_inputs": {"mm_inputs": vllm.MultimodalInputs()},
    "extra_mm_inputs": {"extra_mm_inputs": [vllm.MultimodalInputs()]},
    "media_refs": {"media_refs": vllm.MediaRefs()},
    "data_parallel_rank": {"data_parallel_rank": 1},
    "sampling_params.truncate_prompt_tokens": {"sampling_params": vllm.SamplingParams(truncate_prompt_tokens=3)},
    "sampling_params.logprobs": {"sampling_params": vllm.SamplingParams(logprobs=-1)},
    "sampling_params.prompt_logprobs": {"sampling_params": vllm.SamplingParams(prompt_logprobs=-1)},
    "sampling_params.top_k": {"sampling_params": vllm.SamplingParams(top_k=(1 << 32) - 1)},
    "sampling_params.logit_bias": {"sampling_params": vllm.SamplingParams(logit_bias={-1: 1.0})},
}
INVALID: dict[str, dict[str, Any]] = {
    "sampling_params.top_p": {"top_p": 3.0},
    "sampling_params.stop[0]": {"stop": [""]},
    "sampling_params.max_tokens": {"max_tokens": 0},
    "sampling_params.logit_bias[7]": {"logit_bias": {7: 1000.0}},
    "sampling_params.n": {"n": 1000},
    "sampling_params.structural_tag": {"structural_tag": "{}"},
    "sampling_params.regex": {"regex": "("},
    "sampling_params.grammar": {"grammar": "start: ("},
    "sampling_params.min_tokens": {"json_object": True, "min_tokens": 2},
}


def mapped(metadata: CallMetadata = NO_METADATA, **fields: Any) -> pb.GenerateRequest:
    return generate_request(vllm.GenerateRequest(**{"text": "def f(x):", **fields}), metadata)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return mapped(sampling_params=vllm.SamplingParams(**fields))


def test_zero_and_unset_parameters_are_off() -> None:
    assert mapped().sampling == OFF == sampled(temperature=1, top_p=0, repetition_penalty=0, n=0).sampling
    assert mapped().stopping == pb.StoppingParams(min_tokens=0, ignore_eos=False, include_stop_in_output=False), (
        "max_tokens is what the context length leaves"
    )
    assert sampled(temperature=0).sampling.temperature == 0.0


def test_each_sampling_parameter_changes_the_request_or_is_refused() -> None:
    names = {field.name for field in vllm.SamplingParams.DESCRIPTOR.fields}
    assert names == SAMPLING.keys() | WITHOUT_EFFECT | {"truncate_prompt_tokens"}
    plain = mapped().SerializeToString(deterministic=True)
    for name, value in SAMPLING.items():
        assert sampled(**{name: value}).SerializeToString(deterministic=True) != plain, name


def test_each_field_of_a_request_is_used_or_refused() -> None:
    used = {"request_id", "tokenized", "text", "sampling_params", "stream"}
    assert {field.name for field in vllm.GenerateRequest.DESCRIPTOR.fields} == used | {
        name for name in REFUSED if "." not in name
    }


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(field: str) -> None:
    with pytest.raises((InvalidArgument, Unimplemented)) as error:
        mapped(**REFUSED[field])
    assert error.value.field == field


def test_an_unknown_field_is_refused() -> None:
    known = vllm.GenerateRequest(text="a").SerializeToString()
    with pytest.raises(Unimplemented) as error:
        generate_request(vllm.GenerateRequest.FromString(known + b"\xf8\x3f\x01"), NO_METADATA)
    assert error.value.field == "GenerateRequest.1023"


@pytest.mark.parametrize("field", INVALID)
async def test_an_error_of_validation_has_the_name_that_the_client_knows(field: str) -> None:
    own = sampled(**INVALID[field])
    with pytest.raises((InvalidArgument, Unimplemented)) as error, vllm_field_names():
        await valid(sampling=own.sampling, stopping=own.stopping, guided=own.guided if own.HasField("guided") else None)
    assert error.value.field == field
    assert field in str(error.value)


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        ("json_schema", "json_schema"),
        ("regex", "regex"),
        ("grammar", "ebnf_grammar"),
        ("structural_tag", "structural_tag"),
        ("json_object", "json_object"),
        ("choice", "choice"),
    ],
)
def test_a_constraint_is_the_guide_of_the_same_kind(kind: str, guide: str) -> None:
    assert sampled(**{kind: SAMPLING[kind]}).guided.WhichOneof("guide") == guide


def test_token_ids_are_used_unchanged() -> None:
    own = mapped(text="", tokenized=vllm.TokenizedInput(original_text="for humans", input_ids=[5, 6]))
    assert list(own.token_ids.ids) == [5, 6]
    assert own.response.token_ids
    assert not own.response.text
    assert mapped(tokenized=vllm.TokenizedInput()).WhichOneof("input") == "token_ids", "empty, and refused as such"


def test_llm_ds_metadata_are_model_priority_user_and_queue_time() -> None:
    metadata: list[tuple[str, str | bytes]] = [
        (OBJECTIVE, "critical"),
        (FAIRNESS_ID, "team-a"),
        (TTL, "1m0.5s"),
        (MODEL, "m"),
        ("binary-bin", b""),
    ]
    known = call_metadata(metadata, {"critical": 100})
    assert known == CallMetadata("m", 100, "team-a", 60.5)
    own = mapped(known)
    assert (own.model, own.priority, own.user) == ("m", 100, "team-a")
    assert call_metadata((), {}) == CallMetadata()


def test_the_newer_of_two_names_counts() -> None:
    old, new = ("x-gateway-inference-objective", "1"), (OBJECTIVE, "2")
    assert [call_metadata(pairs, {}).priority for pairs in ([old], [old, new], [new, old])] == [1, 2, 2]


@pytest.mark.parametrize(
    ("key", "value", "limit"),
    [
        (OBJECTIVE, "cheap", "critical"),
        (TTL, "5", "1500ms"),
        (TTL, "0s", "above 0"),
        (TTL, "soon", "Go's form"),
    ],
)
def test_metadata_that_mean_nothing_here_are_refused(key: str, value: str, limit: str) -> None:
    with pytest.raises(InvalidArgument, match=limit) as error:
        call_metadata([(key, value)], {"critical": 100})
    assert error.value.field == key
