"""An inference request as one of ``decant.v1``. What Decant does not do is refused by its name, never ignored."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from decant.protos import inference_pb2 as pb
from decant.protos.kserve import grpc_service_pb2 as kserve
from decant.router.api.validation import check_known
from decant.router.kserve.tensors import (
    EXCLUDE_INPUT,
    SAMPLING,
    STREAM,
    STREAMING,
    TEXT_INPUT,
    TEXT_OUTPUT,
    read_inputs,
)
from decant.runtime.error_details import shorten
from decant.runtime.errors import InvalidArgument, NotFound, Unimplemented

EMPTY_FINAL = "triton_enable_empty_final_response"
_SAMPLING = "temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty seed n"
_GROUPS = {
    "sampling": tuple(_SAMPLING.split()),
    "stopping": ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
    "response": ("skip_special_tokens",),
}
_FIELDS = {name: (group, name) for group, names in _GROUPS.items() for name in names}
_FIELDS["include_stop_str_in_output"] = ("stopping", "include_stop_in_output")


def is_streaming(values: dict[str, str | bool]) -> bool:
    return bool(values.get(STREAM) or values.get(STREAMING))


def generate_request(request: kserve.ModelInferRequest) -> tuple[pb.GenerateRequest, bool]:
    """Map a request; return it, and whether each piece of text is a response of its own.

    As in Triton's vLLM backend, a response that does not stream begins with the input unless that is excluded.
    """
    check_known(request)
    check_version(request.model_name, request.model_version)
    for output in request.outputs:
        if output.name != TEXT_OUTPUT:
            raise Unimplemented(f"outputs.{shorten(output.name)}", limit=f"{TEXT_OUTPUT} alone")
    values = read_inputs(request)
    streams = is_streaming(values)
    own = pb.GenerateRequest(model=request.model_name, prompt=str(values[TEXT_INPUT]))
    own.response.echo = not values.get(EXCLUDE_INPUT, streams)
    if streams and own.response.echo:
        raise InvalidArgument(EXCLUDE_INPUT, "true or unset with stream", False)
    for name, value in _parameters(request, values.get(SAMPLING)).items():
        _set(own, name, value)
    if streams and own.sampling.n > 1:
        raise Unimplemented(f"{SAMPLING}.n", own.sampling.n, limit="1 with stream")
    return own, streams


def check_version(model: str, version: str) -> None:
    if version not in ("", "1"):
        raise NotFound("model", shorten(f"{model} in version {version}"))


def _parameters(request: kserve.ModelInferRequest, given: str | bool | None) -> dict[str, Any]:
    """Sampling parameters: of their tensor, a JSON object, else those of the request."""
    own = dict[str, Any]()
    for name, each in request.parameters.items():
        kind = each.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidArgument(f"parameters.{shorten(name)}", "a value", "none")
        own[name] = getattr(each, kind)
    own.pop(EMPTY_FINAL, None)
    if given is None:
        return own
    try:
        parameters = json.loads(str(given))
    except (ValueError, RecursionError):
        parameters = None
    if not isinstance(parameters, dict):
        raise InvalidArgument(SAMPLING, "a JSON object", shorten(str(given)))
    return {**own, **parameters}


def _set(own: pb.GenerateRequest, name: str, value: Any) -> None:
    if name not in _FIELDS:
        raise Unimplemented(f"{SAMPLING}.{shorten(name)}", shorten(str(value)))
    group, field = _FIELDS[name]
    message: Any = getattr(own, group)
    if isinstance(value, str) and name != "stop":  # Triton's clients send numbers as texts too
        value = _number(name, value)
    try:
        descriptor = message.DESCRIPTOR.fields_by_name[field]
        if descriptor.type != FieldDescriptor.TYPE_BOOL and _has_bool(value):
            raise TypeError(value)  # protobuf takes true for 1 in some fields and versions
        if descriptor.is_repeated:
            if isinstance(value, dict):
                raise TypeError(value)  # its keys would be taken
            getattr(message, field).extend([value] if isinstance(value, str | int) else value)
        else:
            setattr(message, field, value)
    except (TypeError, ValueError, OverflowError):
        kind = "a value of the field's type and range"
        raise InvalidArgument(f"{SAMPLING}.{name}", kind, shorten(str(value))) from None


def _has_bool(value: Any) -> bool:
    return any(isinstance(one, bool) for one in (value if isinstance(value, list) else [value]))


def _number(name: str, text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{SAMPLING}.{name}", "a number, true or false", shorten(text)) from None


@contextmanager
def kserve_field_names() -> Iterator[None]:
    """Name fields in errors as Triton's vLLM backend does."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(_name(error.field), error.limit, error.value, reason=error.reason) from None
    except Unimplemented as error:
        raise Unimplemented(_name(error.field), error.value, limit=error.limit) from None


def _name(field: str) -> str:
    group, dot, name = field.partition(".")
    if dot and group in _GROUPS:
        return f"{SAMPLING}.{name}"
    return TEXT_INPUT if field == "prompt" else field
