from __future__ import annotations

from decant.engine.output import PromptEmbedding, PromptLogprobs, SequenceFinished
from decant.engine.request import Request
from decant.engine.transfer import TransferCommit
from decant.handoff.outgoing_sequence import committed_tokens
from decant.protos import worker_pb2 as wire
from decant.runtime.packed import pack
from decant.worker.prefill.run import PrefillRun
from decant.worker.wire_codec import end_reason, logprobs_to_wire, microseconds


def first_tokens(run: PrefillRun) -> wire.FirstTokens:
    started = run.started
    assert started is not None
    timeline = started.timeline
    assert timeline.scheduled is not None
    assert timeline.first_token is not None
    firsts = [_first(run, request) for request in run.requests]
    return wire.FirstTokens(
        tokens=firsts,
        cached_tokens=min(started.cached, run.request.prompt_len),
        queued_us=microseconds(timeline.scheduled - run.received),
        prefill_us=microseconds(timeline.first_token - timeline.scheduled),
    )


def committed_outputs(run: PrefillRun, commit: TransferCommit) -> list[wire.TransferCommit.Output]:
    """Outputs of a commit, with log-probabilities, and those that ended with their first token."""
    outputs = committed_tokens(commit)
    for request in run.requests:
        if (finished := run.finished.get(request.id)) is not None:
            tokens = (*request.token_ids[request.prompt_len :], run.first_tokens[request.id].token)
            end = _end(run, request, finished)
            outputs.append(wire.TransferCommit.Output(output=end.output, tokens=pack(tokens), finished=end))
    first_tokens = {request.sampling.output_index: run.first_tokens[request.id] for request in run.requests}
    for output in outputs:
        first = first_tokens[output.output]
        if first.logprobs is not None:
            output.logprobs.append(logprobs_to_wire(first.position, first.logprobs))
    return outputs


def prompt_logprobs(run: PrefillRun, part: PromptLogprobs) -> wire.PromptLogprobs:
    entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(part.entries)]
    return wire.PromptLogprobs(run=run.ref, first_position=part.position, logprobs=entries)


def prompt_embedding(run: PrefillRun, part: PromptEmbedding) -> wire.PromptEmbedding:
    return wire.PromptEmbedding(run=run.ref, values=part.values)


def _first(run: PrefillRun, request: Request) -> wire.FirstTokens.First:
    token, finished = run.first_tokens[request.id], run.finished.get(request.id)
    first = wire.FirstTokens.First(output=request.sampling.output_index, token=token.token)
    if token.logprobs is not None:
        first.logprobs.CopyFrom(logprobs_to_wire(0, token.logprobs))
    if finished is not None:
        first.finished.CopyFrom(_end(run, request, finished))
    return first


def _end(run: PrefillRun, request: Request, finished: SequenceFinished) -> wire.OutputEnd:
    return wire.OutputEnd(
        output=request.sampling.output_index,
        reason=end_reason(finished.reason, run.stopping),
        end_position=request.prompt_len + run.first_tokens[request.id].position + 1,
    )
