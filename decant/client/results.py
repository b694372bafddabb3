"""Frozen results. Unset fields are None. Logprobs stay messages (`pb.TokenLogprob`): copying many is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from google.protobuf.message import Message

from decant.protos import inference_pb2 as pb
from decant.runtime.error_details import from_status
from decant.runtime.errors import ServiceError, from_detail

_T = TypeVar("_T")


class FinishReason(StrEnum):
    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CONTEXT_LENGTH = "context_length"
    CANCELLED = "cancelled"
    TIME_LIMIT = "time_limit"


class CancelStatus(StrEnum):
    UNSPECIFIED = "unspecified"
    CANCELLED = "cancelled"
    ALREADY_FINISHED = "already_finished"
    UNKNOWN_REQUEST = "unknown_request"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` are JSON as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of the call with this index; the first one has `id` and `name`."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """New text, calls, reasoning and tokens of an output; `token_ids` and `logprobs` are empty unless requested."""

    index: int
    text: str
    num_tokens: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[pb.TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Finished:
    """End of an output; `stop` is the stop string, or the id of the stop token or EOS.

    `guide_completed`: the output matches its guide; False also without a guide.
    """

    reason: FinishReason
    stop: str | int | None = None
    guide_completed: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_prompt_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """Phases and workers of a request, as drawn at `Receipt` in protos/inference.proto.

    Milliseconds by the router's clock; None for a phase that the request did not enter.
    """

    queue_ms: float | None = None
    prefill_ms: float | None = None
    handoff_ms: float | None = None
    decode_wait_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    second_token_ms: float | None = None
    e2e_ms: float = 0.0
    handoff_bytes: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """Text and tokens of an output; `finished` is None while it is generated."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[pb.TokenLogprob, ...]
    finished: Finished | None
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """Result of a request.

    `text`, `reasoning`, `tool_calls`, `token_ids`, `logprobs` and `finished` are those of its output. They raise
    ValueError where there are several: read `outputs` then.
    """

    request_id: str
    model: str
    seed: int
    outputs: tuple[Output, ...]
    usage: Usage
    receipt: Receipt
    prompt_logprobs: tuple[pb.TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        return only(self.outputs).text

    @property
    def reasoning(self) -> str:
        return only(self.outputs).reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return only(self.outputs).tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return only(self.outputs).token_ids

    @property
    def logprobs(self) -> tuple[pb.TokenLogprob, ...]:
        return only(self.outputs).logprobs

    @property
    def finished(self) -> Finished | None:
        return only(self.outputs).finished


def only(outputs: Sequence[_T]) -> _T:
    """Return the one output. Raises ValueError for several."""
    if len(outputs) > 1:
        raise ValueError(f"the answer has {len(outputs)} outputs: read each in `outputs`")
    return outputs[0]


class GenerationState(StrEnum):
    """State of a request, as drawn at `Generation.State` in protos/inference.proto."""

    UNSPECIFIED = "unspecified"
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDING_OFF = "handing_off"
    DECODING = "decoding"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        return self in (GenerationState.SUCCEEDED, GenerationState.FAILED, GenerationState.CANCELLED)


@dataclass(frozen=True, slots=True)
class Transition:
    """Change of state of a request; `attempt` counts from 1."""

    state: GenerationState
    time: datetime
    attempt: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a request waits for; routers send it on a stream that has been silent for a while.

    attempt         counts from 1
    silent_ms       since the last other message of the stream, or since its call began
    requests_ahead  requests that go before it in its router's queue; None if it does not wait there
    """

    state: GenerationState
    attempt: int
    silent_ms: float
    requests_ahead: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """The stored state of a request. Times are in UTC.

    last_seq     output tokens so far
    answer       output so far; complete once it has succeeded
    error        of its stream, if it failed or was cancelled
    expire_time  None before its end
    transitions  oldest first
    """

    request_id: str
    state: GenerationState
    last_seq: int
    answer: Answer
    create_time: datetime
    expire_time: datetime | None
    error: ServiceError | None
    transitions: tuple[Transition, ...]

    @property
    def text(self) -> str:
        return self.answer.text


def answer(message: pb.GenerateResponse) -> Answer:
    return Answer(
        request_id=message.request_id,
        model=message.model,
        seed=message.seed,
        outputs=tuple(map(_output, message.outputs)),
        usage=plain(Usage, message.usage),
        receipt=plain(Receipt, message.receipt),
        prompt_logprobs=tuple(message.prompt_logprobs),
    )


def generation(message: pb.Generation) -> Generation:
    return Generation(
        request_id=message.request_id,
        state=_state(message.state),
        last_seq=message.last_seq,
        answer=answer(message.result),
        create_time=message.create_time.ToDatetime(UTC),
        expire_time=message.expire_time.ToDatetime(UTC) if message.HasField("expire_time") else None,
        error=from_detail(from_status(message.error)) if message.HasField("error") else None,
        transitions=tuple(
            Transition(_state(one.state), one.time.ToDatetime(UTC), one.attempt) for one in message.transitions
        ),
    )


def waiting(message: pb.Waiting) -> Waiting:
    ahead = message.requests_ahead if message.HasField("requests_ahead") else None
    return Waiting(_state(message.state), message.attempt, message.silent_ms, ahead)


def cancel_status(message: pb.CancelGenerationResponse) -> CancelStatus:
    return _named(CancelStatus, pb.CancelGenerationResponse.Status.Name(message.status), "STATUS_")


def plain(kind: type[_T], message: Message) -> _T:
    values: dict[str, Any] = {}
    for field in fields(kind):  # type: ignore[arg-type]
        has = not message.DESCRIPTOR.fields_by_name[field.name].has_presence or message.HasField(field.name)
        values[field.name] = getattr(message, field.name) if has else None
    return kind(**values)


def delta(message: pb.Delta) -> Delta:
    pieces = tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in message.tool_calls)
    tokens, logprobs = tuple(message.token_ids), tuple(message.logprobs)
    return Delta(message.index, message.text, message.num_tokens, tokens, logprobs, pieces, message.reasoning)


def joined_calls(deltas: Iterable[Delta]) -> tuple[ToolCall, ...]:
    """Calls of an output, from all of its deltas so far."""
    calls: dict[int, list[ToolCallDelta]] = {}
    for piece in (piece for delta in deltas for piece in delta.tool_calls):
        calls.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCall(pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces))
        for _, pieces in sorted(calls.items())
    )


def _output(message: pb.Output) -> Output:
    finished = finished_as(message.finished) if message.HasField("finished") else None
    calls = tuple(ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls)
    ids, logprobs = tuple(message.token_ids), tuple(message.logprobs)
    return Output(message.index, message.text, ids, logprobs, finished, calls, message.reasoning)


def finished_as(message: pb.Finished) -> Finished:
    reason = _named(FinishReason, pb.FinishReason.Name(message.finish_reason), "FINISH_REASON_")
    match = message.WhichOneof("stop_match")
    return Finished(reason, None if match is None else getattr(message, match), message.guide_completed)


def _state(number: pb.Generation.State) -> GenerationState:
    return _named(GenerationState, pb.Generation.State.Name(number), "STATE_")


_E = TypeVar("_E", bound=StrEnum)


def _named(kind: type[_E], name: str, prefix: str) -> _E:
    return kind(name.removeprefix(prefix).lower())
