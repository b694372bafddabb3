"""``inference.GRPCInferenceService`` over a scripted registry; tests/e2e/test_kserve.py has the real client."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import grpc
import pytest

from decant.protos import worker_pb2 as wire
from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.router.kserve.requests import EMPTY_FINAL, generate_request
from decant.runtime.error_details import Reason
from decant.runtime.errors import InvalidArgument, NotFound, ServiceError, Unimplemented
from tests.router.factories import AT_LENGTH
from tests.router.service_harness import error_of_call, harness, writes

Tensor = kserve.ModelInferRequest.InferInputTensor
MODEL = "tiny-python"


def packed(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def request(text: str = "def f(x):", stream: bool | None = None, **more: Any) -> kserve.ModelInferRequest:
    parameters = more.pop("sampling", None)
    made = kserve.ModelInferRequest(model_name=MODEL, **more)
    made.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(packed(text))
    if stream is not None:
        made.inputs.add(name="stream", datatype="BOOL", shape=[1])
        made.raw_input_contents.append(bytes([stream]))
    if parameters is not None:
        made.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        made.raw_input_contents.append(packed(json.dumps(parameters)))
    return made


def texts(response: kserve.ModelInferResponse) -> list[str]:
    (raw,) = response.raw_output_contents
    found, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    (output,) = response.outputs
    assert (output.name, output.datatype, list(output.shape)) == ("text_output", "BYTES", [len(found)])
    return found


async def test_an_answer_begins_with_its_input_unless_that_is_excluded() -> None:
    async with harness() as s:
        s.requests.plan = writes(300, 301, end=AT_LENGTH)
        whole = await s.kserve.ModelInfer(request(id="7"))
        assert (whole.model_name, whole.model_version, whole.id) == (MODEL, "1", "7")
        (text,) = texts(whole)
        assert text.startswith("def f(x):")
        excluded = request()
        excluded.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
        excluded.raw_input_contents.append(b"\1")
        assert texts(await s.kserve.ModelInfer(excluded)) == [text.removeprefix("def f(x):")]


async def test_requests_of_a_stream_are_answered_by_id_and_an_error_ends_only_its_own() -> None:
    async with harness() as s:
        s.requests.plan = writes(300, 301, end=AT_LENGTH)
        last = request(stream=True, id="c")
        last.parameters[EMPTY_FINAL].bool_param = True
        wrong = request(stream=True, id="b", sampling={"top_p": 2})
        sent = iter([request(stream=True, id="a"), wrong, last, request(id="d")])
        answers: dict[str, list[kserve.ModelStreamInferResponse]] = {}
        async for message in s.kserve.ModelStreamInfer(sent):
            answers.setdefault(message.infer_response.id, []).append(message)
        assert sorted(answers) == ["a", "b", "c", "d"]
        (error,) = answers["b"]
        assert error.error_message == "[INVALID_ARGUMENT] sampling_parameters.top_p: above 0, to 1, got 2.0"
        final = answers["c"].pop().infer_response
        assert (final.parameters["triton_final_response"].bool_param, len(final.outputs)) == (True, 0)
        streamed = ["".join(text for each in answers[id] for text in texts(each.infer_response)) for id in "acd"]
        assert streamed[0] == streamed[1] == streamed[2].removeprefix("def f(x):")
        assert all(not each.infer_response.parameters["triton_final_response"].bool_param for each in answers["a"])


async def test_an_idle_stream_ends_when_the_router_drains() -> None:
    async with harness(drain_seconds=60.0) as s:
        s.requests.plan = writes(300, end=AT_LENGTH)
        call = s.kserve.ModelStreamInfer()
        await call.write(request(id="a"))
        assert (await call.read()).infer_response.id == "a"
        s.server.shutdown.request("a drain")
        assert (await error_of_call(call.read())).reason is Reason.DRAINING


async def test_a_stream_that_the_client_leaves_loses_its_requests() -> None:
    async with harness() as s:
        call = s.kserve.ModelStreamInfer(iter([request(stream=True)]))
        stream = await s.stream()
        call.cancel()
        assert await s.lost() is stream


async def test_several_outputs_are_elements_of_one_tensor() -> None:
    made, streams = generate_request(request(sampling={"n": 2}))
    assert (made.sampling.n, streams) == (2, False)
    with pytest.raises(Unimplemented, match=r"sampling_parameters\.n: 1 with stream"):
        generate_request(request(stream=True, sampling={"n": 2}))


def test_sampling_parameters_come_from_their_tensor_or_the_request_and_may_be_texts() -> None:
    sampling = {"temperature": "0.1", "max_tokens": "100", "ignore_eos": "True", "stop": "end", "seed": 3}
    sampling["include_stop_str_in_output"] = True
    made, _ = generate_request(request(sampling=sampling))
    assert made.sampling.temperature == pytest.approx(0.1)
    assert (made.sampling.seed, made.stopping.max_tokens, made.stopping.ignore_eos) == (3, 100, True)
    assert (list(made.stopping.stop), made.stopping.include_stop_in_output) == (["end"], True)
    own = request()
    own.parameters["max_tokens"].int64_param = 5
    assert generate_request(own)[0].stopping.max_tokens == 5


def with_tensor(**fields: Any) -> kserve.ModelInferRequest:
    made = kserve.ModelInferRequest(model_name=MODEL)
    contents = fields.pop("contents", {})
    tensor = made.inputs.add(**{"name": "text_input", "datatype": "BYTES", "shape": [1], **fields})
    tensor.contents.MergeFrom(kserve.InferTensorContents(**contents))
    return made


def raw(data: bytes) -> kserve.ModelInferRequest:
    made = with_tensor()
    made.raw_input_contents.append(data)
    return made


REFUSED: dict[str, tuple[kserve.ModelInferRequest, type[ServiceError], str]] = {
    "no input": (kserve.ModelInferRequest(), InvalidArgument, "text_input: an input of this name, got none"),
    "another input": (with_tensor(name="image"), Unimplemented, "inputs.image: one of text_input, .+"),
    "another type": (with_tensor(datatype="FP32"), InvalidArgument, "inputs.text_input.datatype: BYTES, got FP32"),
    "two texts": (
        with_tensor(shape=[2], contents={"bytes_contents": [b"a", b"b"]}),
        InvalidArgument,
        r"inputs.text_input: one element, in a shape of ones, got 2 in \[2\]",
    ),
    "no text": (
        with_tensor(contents={"bytes_contents": [b"\xff"]}),
        InvalidArgument,
        "inputs.text_input: text in UTF-8.+",
    ),
    "a wrong length": (
        raw(b"\x09\0\0\0ab"),
        InvalidArgument,
        "inputs.text_input: elements behind their lengths.+6 bytes",
    ),
    "raw and typed": (
        kserve.ModelInferRequest(raw_input_contents=[b""]),
        InvalidArgument,
        "raw_input_contents: one for each of 0 inputs, or none, got 1",
    ),
    "another output": (
        request(outputs=[kserve.ModelInferRequest.InferRequestedOutputTensor(name="logits")]),
        Unimplemented,
        "outputs.logits: text_output alone.+",
    ),
    "an unknown parameter": (request(sampling={"best_of": 2}), Unimplemented, "sampling_parameters.best_of: .+ got 2"),
    "a wrong parameter": (
        request(sampling={"max_tokens": [1]}),
        InvalidArgument,
        r"sampling_parameters.max_tokens: a value of the field's type and range, got \[1\]",
    ),
    **{
        f"true as {name}": (
            request(sampling={name: [True] if name == "stop_token_ids" else True}),
            InvalidArgument,
            rf"sampling_parameters.{name}: a value of the field's type and range, got \[?True\]?",
        )
        for name in ("max_tokens", "temperature", "seed", "stop_token_ids", "stop")
    },
    "no number": (request(sampling={"seed": "x"}), InvalidArgument, "sampling_parameters.seed: a number, .+, got x"),
    "no object": (request(sampling=[]), InvalidArgument, r"sampling_parameters: a JSON object, got \[\]"),
    "a version": (request(model_version="2"), NotFound, ".+tiny-python in version 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_done_is_refused_by_name(case: str) -> None:
    made, kind, message = REFUSED[case]
    with pytest.raises(kind) as refused:
        generate_request(made)
    assert re.fullmatch(message, str(refused.value)), str(refused.value)


async def test_errors_of_the_request_have_the_names_of_the_tensors() -> None:
    async with harness() as s:
        for made, field in (
            (request(""), "text_input"),
            (request(sampling={"temperature": -1}), "sampling_parameters.temperature"),
            (request(stream=True), "stream"),
        ):
            error = await error_of_call(s.kserve.ModelInfer(made))
            assert isinstance(error, InvalidArgument)
            assert error.field == field


async def test_models_and_server_are_described() -> None:
    async with harness() as s:
        assert (await s.kserve.ServerLive(kserve.ServerLiveRequest())).live
        assert (await s.kserve.ServerMetadata(kserve.ServerMetadataRequest())).name == "decant"
        s.requests.context_length = 64
        assert (await s.kserve.ModelReady(kserve.ModelReadyRequest(name=MODEL))).ready
        s.requests.context_length = None
        assert not (await s.kserve.ModelReady(kserve.ModelReadyRequest(name=MODEL))).ready
        about = await s.kserve.ModelMetadata(kserve.ModelMetadataRequest(name=MODEL, version="1"))
        assert [(tensor.name, tensor.datatype) for tensor in about.inputs] == [
            ("text_input", "BYTES"),
            ("stream", "BOOL"),
            ("sampling_parameters", "BYTES"),
            ("exclude_input_in_output", "BOOL"),
        ]
        error = await error_of_call(s.kserve.ModelMetadata(kserve.ModelMetadataRequest(name="other")))
        assert error.code is grpc.StatusCode.NOT_FOUND
        s.requests.context_length, s.requests.known_adapters = 64, [wire.Adapter(name="other", digest="d")]
        assert (await s.kserve.ModelReady(kserve.ModelReadyRequest(name="other"))).ready
        assert (await s.kserve.ModelMetadata(kserve.ModelMetadataRequest(name="other"))).name == "other"
