from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import replace

from decant.engine.errors import InvalidRequest
from decant.engine.guides.compiler import Grammar, GrammarCompiler
from decant.engine.guides.guide import Guide
from decant.engine.plan import TokenLogprobs
from decant.engine.reasoning import ReasoningLimit, ReasoningMarkers
from decant.engine.request import EmbeddingParams, FinishReason, Pooling, Request, SamplingParams, StopParams
from decant.protos import worker_pb2 as wire
from decant.runtime import priority
from decant.runtime.packed import unpack

NOT_SUPPORTED = "not supported by this build"

_FIELDS = {
    "token_ids": "prompt",
    "prompt_tokens": "prompt",
    "stop_token_ids": "stopping.stop_token_ids",
    "max_tokens": "stopping.max_tokens",
    "min_tokens": "stopping.min_tokens",
    "n": "sampling.n",
    "ignore_eos": "stopping.ignore_eos",
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias")
_POOLINGS = {wire.Embedding.POOLING_LAST: Pooling.LAST, wire.Embedding.POOLING_MEAN: Pooling.MEAN}
_ENDS = {
    FinishReason.STOP: wire.OutputEnd.REASON_STOP,
    FinishReason.LENGTH: wire.OutputEnd.REASON_LENGTH,
    FinishReason.CONTEXT_LENGTH: wire.OutputEnd.REASON_CONTEXT_LENGTH,
    FinishReason.CANCELLED: wire.OutputEnd.REASON_CANCELLED,
}


class RequestRejected(Exception):
    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(f"{wire.Cause.Name(failure.cause)}: {failure.detail}")
        self.failure = failure

    @classmethod
    def because(cls, field: str, limit: str, value: object, cause: wire.Cause = wire.CAUSE_INVALID) -> RequestRejected:
        violation = wire.Violation(field=field, limit=limit, value=str(value)[:80])
        return cls(wire.Failure(cause=cause, detail=f"{field}: {limit}, got {violation.value}", violation=violation))

    @classmethod
    def of(cls, error: InvalidRequest) -> RequestRejected:
        name = error.field.partition("[")[0]
        if name == "adapter":  # it was dropped after the request had come
            return cls.because(name, error.limit, error.value, wire.CAUSE_UNKNOWN_ADAPTER)
        known = name in _SAMPLING or name.endswith("_penalty")
        return cls.because(f"sampling.{error.field}" if known else _FIELDS.get(name, name), error.limit, error.value)


def other_request() -> wire.Failure:
    return wire.Failure(cause=wire.CAUSE_ID_REUSED, detail="another request with this id is running here")


def to_requests(
    name: str,
    message: wire.EngineRequest,
    *,
    model: str,
    park_after: bool = False,
    guides: GrammarCompiler | None = None,
    adapters: Container[str] = (),
) -> list[Request]:
    """Convert a request to one for each output, named ``name`` and an index, in the order of the message.

    The first returns the prompt's log-probabilities, if they are wanted. ``park_after`` parks each sequence after its
    next token. Without ``guides``, of this worker's tokenizer, a guide is refused; its grammar may not be compiled yet.
    ``adapters``: the digests that a request may have. Raises RequestRejected.
    """
    _check_adapter(message.adapter, adapters)
    _check_supported(message, model, () if guides else ("guide",))
    prompt = _unpacked("prompt", message.prompt)
    try:
        whole = Request(
            name,
            prompt,
            sampling=_sampling(message),
            stop=_stop(message.stopping),
            priority=message.priority,
            salt=message.salt,
            use_prefix_cache=not message.bypass_prefix_cache,
            logprobs=message.logprobs if message.HasField("logprobs") else None,
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            prompt_logprobs_from=max(1, message.prompt_logprobs_from),
            embedding=_embedding(message.embedding) if message.HasField("embedding") else None,
            grammar=_grammar(message.guide, guides),
            adapter=message.adapter,
            reasoning=_reasoning(message.reasoning) if message.HasField("reasoning") else None,
        )
        return [_output_request(whole, prefix, place, park_after) for place, prefix in enumerate(message.outputs)]
    except InvalidRequest as error:
        raise RequestRejected.of(error) from None


def _output_request(whole: Request, prefix: wire.OutputPrefix, place: int, park_after: bool) -> Request:
    prior_tokens = _unpacked("outputs.tokens", prefix.tokens)
    return replace(
        whole,
        id=f"{whole.id}/{place}" if place else whole.id,
        token_ids=(*whole.token_ids, *prior_tokens),
        prompt_tokens=len(whole.token_ids),
        sampling=replace(whole.sampling, output_index=prefix.output),
        prompt_logprobs=None if place else whole.prompt_logprobs,
        park_after=len(prior_tokens) + 1 if park_after else None,
    )


def _grammar(message: wire.Guide, guides: GrammarCompiler | None) -> Grammar | None:
    kind = message.WhichOneof("kind")
    if kind is None or guides is None:
        return None
    return guides.grammar(Guide.of(kind, getattr(message, kind), message.answer_field))


def _embedding(message: wire.Embedding) -> EmbeddingParams:
    if message.pooling not in _POOLINGS:
        raise RequestRejected.because("pooling", NOT_SUPPORTED, message.pooling, wire.CAUSE_UNSUPPORTED)
    dimensions = message.dimensions if message.HasField("dimensions") else None
    return EmbeddingParams(_POOLINGS[message.pooling], dimensions, message.normalize)


def _check_adapter(digest: str, adapters: Container[str]) -> None:
    if digest and digest not in adapters:
        raise RequestRejected.because("adapter", "one that this worker has", digest, wire.CAUSE_UNKNOWN_ADAPTER)


def _reasoning(message: wire.ReasoningLimit) -> ReasoningLimit:
    begin = tuple(_unpacked("reasoning.begin", message.begin))
    return ReasoningLimit(ReasoningMarkers(begin, message.end, message.is_open), message.max_tokens)


def _check_supported(message: wire.EngineRequest, model: str, unsupported: Collection[str]) -> None:
    if message.model != model:
        raise RequestRejected.because(
            "model", f"{model}, which this worker serves", message.model, wire.CAUSE_UNKNOWN_MODEL
        )
    indexes = [prefix.output for prefix in message.outputs]
    if not indexes or len(set(indexes)) < len(indexes):
        raise RequestRejected.because("outputs", "at least one, each once", indexes)
    if message.HasField("embedding") and len(indexes) > 1:
        raise RequestRejected.because("outputs", "one with an embedding", len(indexes))
    for field in unsupported:
        if getattr(message, field) != getattr(wire.EngineRequest(), field):
            raise RequestRejected.because(field, NOT_SUPPORTED, "a value", wire.CAUSE_UNSUPPORTED)


def _sampling(message: wire.EngineRequest) -> SamplingParams:
    sampling = message.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
    )


def _stop(stopping: wire.Stopping) -> StopParams:
    return StopParams(
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
        stop_token_ids=frozenset(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
    )


def end_reason(reason: FinishReason, stopping: wire.Stopping) -> wire.OutputEnd.Reason:
    """Convert a finish reason other than FAILED, for which the run fails instead."""
    if reason is FinishReason.LENGTH and stopping.capped_by_context_length:
        return wire.OutputEnd.REASON_CONTEXT_LENGTH
    return _ENDS[reason]


def queue_key(message: wire.EngineRequest, now: float) -> float:
    """Queue key of a request received at ``now``, in seconds; the smallest goes first."""
    return priority.queue_key(now - message.age_ms / 1000, message.priority)


def logprobs_to_wire(entry: int, logprobs: TokenLogprobs) -> wire.TokenLogprobs:
    """Convert logprobs; ``entry`` is the index of the token in the message's array."""
    ids, values = zip(*logprobs.top, strict=True) if logprobs.top else ((), ())
    return wire.TokenLogprobs(
        entry=entry, logprob=logprobs.logprob, rank=logprobs.rank, top_ids=ids, top_logprobs=values
    )


def logprobs_from_wire(token: int, message: wire.TokenLogprobs) -> TokenLogprobs:
    top = tuple(zip(message.top_ids, message.top_logprobs, strict=True))
    return TokenLogprobs(token, message.logprob, message.rank, top)


def microseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _unpacked(field: str, data: bytes) -> tuple[int, ...]:
    try:
        return tuple(unpack(data))
    except ValueError:
        raise RequestRejected.because(field, "packed uint32", f"{len(data)} bytes") from None
