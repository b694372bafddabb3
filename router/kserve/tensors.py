"""Tensors of requests and responses: one text or one bool each, in raw bytes or as typed contents."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.runtime.errors import InvalidArgument, Unimplemented

TEXT_INPUT, STREAM, SAMPLING, EXCLUDE_INPUT = "text_input", "stream", "sampling_parameters", "exclude_input_in_output"
STREAMING = "streaming"
"""Another name of ``stream``, as Triton's TensorRT-LLM backend has it."""
TEXT_OUTPUT = "text_output"
DATATYPES: Mapping[str, str] = {
    TEXT_INPUT: "BYTES",
    STREAM: "BOOL",
    STREAMING: "BOOL",
    SAMPLING: "BYTES",
    EXCLUDE_INPUT: "BOOL",
}


def read_inputs(request: kserve.ModelInferRequest) -> dict[str, str | bool]:
    """Values of the inputs by name. Raises InvalidArgument, Unimplemented."""
    raw = list(request.raw_input_contents)
    if raw and len(raw) != len(request.inputs):
        raise InvalidArgument("raw_input_contents", f"one for each of {len(request.inputs)} inputs, or none", len(raw))
    values: dict[str, str | bool] = {}
    for index, tensor in enumerate(request.inputs):
        if (datatype := DATATYPES.get(tensor.name)) is None:
            raise Unimplemented(f"inputs.{tensor.name[:64]}", limit=f"one of {', '.join(DATATYPES)}")
        if tensor.datatype != datatype:
            raise InvalidArgument(f"inputs.{tensor.name}.datatype", datatype, tensor.datatype[:64])
        elements = list(_elements(tensor, raw[index] if raw else None))
        if len(elements) != 1 or any(size != 1 for size in tensor.shape):
            limit = "one element, in a shape of ones"
            raise InvalidArgument(f"inputs.{tensor.name}", limit, f"{len(elements)} in {list(tensor.shape)[:8]}")
        values[tensor.name] = elements[0]
    if TEXT_INPUT not in values:
        raise InvalidArgument(TEXT_INPUT, "an input of this name", "none")
    return values


def _elements(tensor: kserve.ModelInferRequest.InferInputTensor, raw: bytes | None) -> Iterator[str | bool]:
    name = f"inputs.{tensor.name}"
    if tensor.datatype == "BOOL":
        yield from tensor.contents.bool_contents if raw is None else map(bool, raw)
        return
    try:
        for element in tensor.contents.bytes_contents if raw is None else _unpacked(raw):
            yield element.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, "text in UTF-8", "other bytes") from None
    except struct.error:
        raise InvalidArgument(name, "elements behind their lengths, each 4 bytes", f"{len(raw or b'')} bytes") from None


def _unpacked(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        (element,) = struct.unpack_from(f"<{size}s", raw, at + 4)
        at += 4 + size
        yield element


def text_response(
    request: kserve.ModelInferRequest, texts: list[str], *, is_final: bool | None = None
) -> kserve.ModelInferResponse:
    """Response with a text for each output; none: without tensors. ``is_final`` is of a stream's response."""
    response = kserve.ModelInferResponse(model_name=request.model_name, model_version="1", id=request.id)
    if is_final is not None:
        response.parameters["triton_final_response"].bool_param = is_final
    if texts:
        response.outputs.add(name=TEXT_OUTPUT, datatype="BYTES", shape=[len(texts)])
        encoded = [text.encode() for text in texts]
        response.raw_output_contents.append(b"".join(struct.pack("<I", len(each)) + each for each in encoded))
    return response
