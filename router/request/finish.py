from __future__ import annotations

from collections.abc import Sequence

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.output import Finish
from decant.router.request.valid_request import ValidRequest
from decant.runtime.errors import DeadlineExceeded


def finish_from_tokens(request: ValidRequest, tokens: Sequence[int]) -> Finish | None:
    """Finish that an output's tokens alone imply, if any: the worker's report may be lost."""
    stopping = request.engine_request.stopping
    if not tokens:
        return None
    if tokens[-1] in request.eos_token_ids or tokens[-1] in stopping.stop_token_ids:
        return _stopped(request, tokens)
    return _full(stopping) if len(tokens) >= stopping.max_tokens else None


def finish_from_worker(end: wire.OutputEnd, request: ValidRequest, tokens: Sequence[int]) -> Finish | None:
    """Finish that a worker reports; None if the output was cancelled. Raises DeadlineExceeded."""
    match end.reason:
        case wire.OutputEnd.REASON_STOP:
            return _stopped(request, tokens)
        case wire.OutputEnd.REASON_CONTEXT_LENGTH:
            return Finish(pb.FINISH_REASON_CONTEXT_LENGTH)
        case wire.OutputEnd.REASON_LENGTH:
            return _full(request.engine_request.stopping)
        case wire.OutputEnd.REASON_DEADLINE:
            raise DeadlineExceeded
        case _:
            return None


def _full(stopping: wire.Stopping) -> Finish:
    return Finish(pb.FINISH_REASON_CONTEXT_LENGTH if stopping.capped_by_context_length else pb.FINISH_REASON_LENGTH)


def _stopped(request: ValidRequest, tokens: Sequence[int]) -> Finish:
    """Finish by the last token. A guide allows an end token only where its grammar is complete."""
    if not tokens:
        return Finish(pb.FINISH_REASON_STOP)
    last = tokens[-1]
    is_complete = request.engine_request.HasField("guide") and last in request.eos_token_ids
    if last in request.engine_request.stopping.stop_token_ids:
        return Finish(pb.FINISH_REASON_STOP, stop_token_id=last, guide_completed=is_complete)
    return Finish(pb.FINISH_REASON_STOP, eos_token_id=last, guide_completed=is_complete)
