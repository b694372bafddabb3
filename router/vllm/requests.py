"""A vLLM request as one of ``decant.v1``. What Decant does not do is refused by the field's name, never ignored.

Where vLLM's message has no presence, zero means unset, and unset means off: a gateway fills in the model's defaults,
which it gets from `GetModelInfo`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decant.engine.request import MAX_LOGPROBS
from decant.protos import inference_pb2 as pb
from decant.protos.vllm import vllm_engine_pb2 as vllm
from decant.router.api.validation import check_known
from decant.router.limits import check_range
from decant.router.vllm.metadata import OBJECTIVE, CallMetadata
from decant.runtime.errors import InvalidArgument, Unimplemented

_UNSUPPORTED = (
    "kv_transfer_params",
    "mm_inputs",
    "extra_mm_inputs",
    "kv_transfer_params_json",
    "media_refs",
)
_MAX_UINT64 = (1 << 64) - 1

_NAMES = (
    ("inputs[0].token_ids.ids", "tokenized.input_ids"),
    ("token_ids.ids", "tokenized.input_ids"),
    ("GuidedDecoding.", "sampling_params."),
    ("SamplingParams.", "sampling_params."),
    ("sampling.", "sampling_params."),
    ("stopping.", "sampling_params."),
    ("response.", "sampling_params."),
    ("guided.ebnf_grammar", "sampling_params.grammar"),
    ("guided.", "sampling_params."),
    ("guided", "sampling_params.constraint"),
    ("priority", OBJECTIVE),
    ("prompt", "text"),
)
"""Beginnings of ``decant.v1``'s names of fields, and vLLM's names."""


def generate_request(request: vllm.GenerateRequest, metadata: CallMetadata) -> pb.GenerateRequest:
    """Map a request. Raises InvalidArgument and Unimplemented, with vLLM's names of the fields."""
    check_known(request)
    _check_supported(request)
    params = request.sampling_params
    own = pb.GenerateRequest(
        request_id=request.request_id,
        model=metadata.model,
        sampling=_sampling(params),
        stopping=_stopping(params),
        response=_response(params),
        priority=metadata.priority,
        user=metadata.fairness_id,
    )
    match request.WhichOneof("input"):
        case "tokenized":
            own.token_ids.ids[:] = request.tokenized.input_ids
            own.token_ids.SetInParent()
        case "text":
            own.prompt = request.text
    if constraint := params.WhichOneof("constraint"):
        _set_guide(own.guided, constraint, params)
    return own


@contextmanager
def vllm_field_names() -> Iterator[None]:
    """Name fields in errors as vLLM does."""
    try:
        yield
    except InvalidArgument as error:
        raise InvalidArgument(
            _vllm_name(error.field), _vllm_names(error.limit), error.value, reason=error.reason
        ) from None
    except Unimplemented as error:
        raise Unimplemented(_vllm_name(error.field), error.value, limit=_vllm_names(error.limit)) from None


def _vllm_name(field: str) -> str:
    for ours, theirs in _NAMES:
        if field.startswith(ours):
            return theirs + field.removeprefix(ours)
    return field


def _vllm_names(limit: str) -> str:
    return limit.replace("response.", "sampling_params.")


def _check_supported(request: vllm.GenerateRequest) -> None:
    present = {field.name for field, _ in request.ListFields()}
    for name in _UNSUPPORTED:
        if name in present:
            raise Unimplemented(name)
    if request.data_parallel_rank:
        raise InvalidArgument("data_parallel_rank", "0 or unset: there is one rank", request.data_parallel_rank)
    if request.sampling_params.HasField("truncate_prompt_tokens"):
        raise Unimplemented("sampling_params.truncate_prompt_tokens", request.sampling_params.truncate_prompt_tokens)


def _sampling(params: vllm.SamplingParams) -> pb.SamplingParams:
    for token in params.logit_bias:
        check_range("sampling_params.logit_bias", token, 0, (1 << 31) - 1)
    return pb.SamplingParams(
        temperature=params.temperature if params.HasField("temperature") else 1.0,
        top_p=params.top_p or 1.0,
        top_k=_top_k(params.top_k),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or 1.0,
        # A negative seed is another seed than each positive one.
        seed=params.seed & _MAX_UINT64 if params.HasField("seed") else None,
        n=params.n or 1,
        logit_bias=dict(params.logit_bias.items()),
    )


def embed_request(request: vllm.EmbedRequest, metadata: CallMetadata) -> pb.EmbedRequest:
    """Map a request for an embedding: the last token's, of length 1, as vLLM has it for a model that generates."""
    check_known(request)
    own = pb.EmbedRequest(model=metadata.model, priority=metadata.priority)
    own.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
    own.inputs[0].token_ids.SetInParent()
    return own


def _top_k(top_k: int) -> int:
    check_range("sampling_params.top_k", top_k, 0, (1 << 31) - 1)
    return top_k


def _stopping(params: vllm.SamplingParams) -> pb.StoppingParams:
    return pb.StoppingParams(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        include_stop_in_output=params.include_stop_str_in_output,
    )


def _response(params: vllm.SamplingParams) -> pb.ResponseOptions:
    """Token ids alone: the gateway detokenizes. The options of text matter only to stop strings."""
    return pb.ResponseOptions(
        text=False,
        token_ids=True,
        logprobs=_alternatives("logprobs", params),
        prompt_logprobs=_alternatives("prompt_logprobs", params),
        skip_special_tokens=params.skip_special_tokens,
    )


def _alternatives(name: str, params: vllm.SamplingParams) -> int | None:
    if not params.HasField(name):
        return None
    count: int = getattr(params, name)
    check_range(f"sampling_params.{name}", count, 0, MAX_LOGPROBS)
    return count


def _set_guide(guided: pb.GuidedDecoding, constraint: str, params: vllm.SamplingParams) -> None:
    match constraint:
        case "grammar":
            guided.ebnf_grammar = params.grammar
        case "choice":
            guided.choice.choices[:] = params.choice.choices
            guided.choice.SetInParent()
        case _:
            setattr(guided, constraint, getattr(params, constraint))
