"""What a router asks becomes what the engine is asked, and what the engine says becomes what a router is told.

wire.EngineRequest ── to_request ──> engine Request        (WorkRefused: what is wrong, as the wire says it)
TokenLogprobs, FinishReason ──> wire
"""

from __future__ import annotations

from decant.engine.errors import InvalidRequest
from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
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
}
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias")
_ENDS = {
    FinishReason.STOP: wire.OutputEnd.REASON_STOP,
    FinishReason.LENGTH: wire.OutputEnd.REASON_LENGTH,
    FinishReason.CONTEXT_LENGTH: wire.OutputEnd.REASON_CONTEXT_LENGTH,
    FinishReason.CANCELLED: wire.OutputEnd.REASON_CANCELLED,
}


class RequestRejected(Exception):
    """Work that can't be done here; ``failure`` says why."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(f"{wire.Cause.Name(failure.cause)}: {failure.detail}")
        self.failure = failure

    @classmethod
    def because(cls, field: str, limit: str, value: object, cause: wire.Cause = wire.CAUSE_INVALID) -> RequestRejected:
        """A field of ``Work`` that breaks a limit."""
        violation = wire.Violation(field=field, limit=limit, value=str(value)[:80])
        return cls(wire.Failure(cause=cause, detail=f"{field}: {limit}, got {violation.value}", violation=violation))

    @classmethod
    def of(cls, error: InvalidRequest) -> RequestRejected:
        """What the engine says of a request, by the name that the field has in ``Work``."""
        name = error.field.partition("[")[0]
        known = name in _SAMPLING or name.endswith("_penalty")
        return cls.because(f"sampling.{error.field}" if known else _FIELDS.get(name, name), error.limit, error.value)


def other_request() -> wire.Failure:
    """Why nothing is done for a run whose request id belongs to another payload here."""
    return wire.Failure(cause=wire.CAUSE_ID_REUSED, detail="another request with this id is at work here")


def to_request(sequence_id: str, work: wire.EngineRequest, *, model: str, park_after: bool = False) -> Request:
    """The engine's request for the one output of ``work``, under the name ``sequence_id``.

    ``park_after``: stop and keep the blocks after the first token written from here. Raises WorkRefused.
    """
    _check_supported(work, model)
    written = _unpacked("outputs.tokens", work.outputs[0].tokens)
    prompt = _unpacked("prompt", work.prompt)
    try:
        return Request(
            sequence_id,
            (*prompt, *written),
            prompt_tokens=len(prompt),
            sampling=_sampling(work),
            stop=_stop(work.stopping),
            priority=work.priority,
            salt=work.salt,
            use_prefix_cache=not work.bypass_prefix_cache,
            logprobs=work.logprobs if work.HasField("logprobs") else None,
            prompt_logprobs=work.prompt_logprobs if work.HasField("prompt_logprobs") else None,
            park_after=len(written) + 1 if park_after else None,
        )
    except InvalidRequest as error:
        raise RequestRejected.of(error) from None


def _check_supported(work: wire.EngineRequest, model: str) -> None:
    if work.model != model:
        raise RequestRejected.because("model", f"{model} is served here", work.model, wire.CAUSE_UNKNOWN_MODEL)
    if len(work.outputs) != 1:
        raise RequestRejected.because("outputs", "exactly one", len(work.outputs), wire.CAUSE_UNSUPPORTED)
    for field in ("adapter", "guide"):
        if getattr(work, field) != getattr(wire.EngineRequest(), field):
            raise RequestRejected.because(field, NOT_SUPPORTED, "a value", wire.CAUSE_UNSUPPORTED)


def _sampling(work: wire.EngineRequest) -> SamplingParams:
    asked = work.sampling
    return SamplingParams(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        repetition_penalty=asked.repetition_penalty,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        logit_bias=dict(asked.logit_bias),
        seed=asked.seed,
        output_index=work.outputs[0].output,
    )


def _stop(asked: wire.Stopping) -> StopParams:
    return StopParams(
        max_tokens=asked.max_tokens,
        min_tokens=asked.min_tokens,
        stop_token_ids=frozenset(asked.stop_token_ids),
        ignore_eos=asked.ignore_eos,
    )


def end_reason(reason: FinishReason, stopping: wire.Stopping) -> wire.OutputEnd.Reason:
    """Why an output wrote its last token. A sequence that FAILED has no such reason: its run did."""
    if reason is FinishReason.LENGTH and stopping.cut_to_window:
        return wire.OutputEnd.REASON_CONTEXT_LENGTH
    return _ENDS[reason]


def queue_key(work: wire.EngineRequest, now: float) -> float:
    """Where work that came in at ``now`` (seconds) stands in a queue: the smallest goes first.

    Fixed when it comes in: a level of priority is worth so much waiting, and time spent in earlier attempts counts.
    """
    return priority.queue_key(now - work.age_ms / 1000, work.priority)


def logprobs_to_wire(entry: int, logprobs: TokenLogprobs) -> wire.TokenLogprobs:
    """Log-probabilities of the token at place ``entry`` of the array beside them."""
    ids, values = zip(*logprobs.top, strict=True) if logprobs.top else ((), ())
    return wire.TokenLogprobs(
        entry=entry, logprob=logprobs.logprob, rank=logprobs.rank, top_ids=ids, top_logprobs=values
    )


def logprobs_from_wire(token: int, told: wire.TokenLogprobs) -> TokenLogprobs:
    """What ``token_logprobs`` told of a token."""
    top = tuple(zip(told.top_ids, told.top_logprobs, strict=True))
    return TokenLogprobs(token, told.logprob, told.rank, top)


def _unpacked(field: str, data: bytes) -> tuple[int, ...]:
    try:
        return tuple(unpack(data))
    except ValueError:
        raise RequestRejected.because(field, "packed uint32", f"{len(data)} bytes") from None
