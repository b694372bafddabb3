from __future__ import annotations

from decant.engine.output import PromptLogprobs, Token
from decant.protos import worker_pb2 as wire
from decant.worker.prefill.run import PrefillRun
from decant.worker.wire_codec import end_reason, logprobs_to_wire, microseconds


def first_tokens(run: PrefillRun) -> wire.FirstTokens:
    started, token = run.started, run.first_token
    assert started is not None
    assert token is not None
    timeline = started.timeline
    assert timeline.scheduled is not None
    assert timeline.first_token is not None
    return wire.FirstTokens(
        tokens=[_first(run, token)],
        cached_tokens=min(started.cached, run.request.prompt_len),
        queued_us=microseconds(timeline.scheduled - run.received),
        prefill_us=microseconds(timeline.first_token - timeline.scheduled),
    )


def first_logprobs(run: PrefillRun) -> list[wire.TokenLogprobs]:
    token = run.first_token
    return [] if token is None or token.logprobs is None else [logprobs_to_wire(token.position, token.logprobs)]


def prompt_logprobs(run: PrefillRun, part: PromptLogprobs) -> wire.PromptLogprobs:
    entries = [logprobs_to_wire(entry, logprobs) for entry, logprobs in enumerate(part.entries)]
    return wire.PromptLogprobs(run=run.ref, first_position=part.position, logprobs=entries)


def _first(run: PrefillRun, token: Token) -> wire.FirstTokens.First:
    first = wire.FirstTokens.First(output=run.output, token=token.token)
    if token.logprobs is not None:
        first.logprobs.CopyFrom(logprobs_to_wire(0, token.logprobs))
    if run.finished is not None:
        first.finished.output = run.output
        first.finished.reason = end_reason(run.finished.reason, run.stopping)
        first.finished.end_position = run.request.prompt_len + token.position + 1
    return first
