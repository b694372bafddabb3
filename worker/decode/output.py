"""One output of a decode worker's run: a sequence of the engine, and its tokens until the router has them all."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from decant.engine.output import SequenceFinished, Token
from decant.engine.plan import TokenLogprobs
from decant.engine.request import FinishReason, Request
from decant.engine.sequence import Timeline
from decant.protos import worker_pb2 as wire
from decant.worker.wire_codec import end_reason

if TYPE_CHECKING:
    from decant.worker.decode.run import DecodeRun


@dataclass(slots=True, eq=False)
class Output:
    """``tokens`` are of the output, with those of earlier attempts; positions are of the sequence."""

    run: DecodeRun
    request: Request  # ``request.id`` identifies the sequence in the engine
    stopping: wire.Stopping
    slot: int = 0  # in the session of the run's owner
    tokens: array[int] = field(default_factory=lambda: array("I"))
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in ``tokens``
    early_tokens: list[Token] = field(default_factory=list)  # reported before the fetch returned
    timeline: Timeline | None = None  # the engine's, once it began
    truncated_at: int | None = None  # number of tokens that count, if fewer than were generated
    is_cancelled: bool = False  # alone: the other outputs go on
    end: wire.OutputEnd | None = None
    finished: asyncio.Future[SequenceFinished] = field(default_factory=asyncio.Future)

    def __post_init__(self) -> None:
        self.tokens.extend(self.request.token_ids[self.request.prompt_len :])

    @property
    def index(self) -> int:
        return self.request.sampling.output_index

    @property
    def prior_tokens(self) -> int:
        """Number of tokens of earlier attempts."""
        return len(self.request.token_ids) - self.request.prompt_len

    @property
    def position(self) -> int:
        return self.request.prompt_len + len(self.tokens)

    @property
    def num_cacheable(self) -> int | None:
        """Number of leading tokens that may stay in the prefix cache; None for all."""
        return None if self.truncated_at is None else self.request.prompt_len + self.truncated_at

    def index_of(self, position: int) -> int:
        """Index in ``tokens`` of a position, at most their number."""
        return min(max(0, position - self.request.prompt_len), len(self.tokens))

    def status_slot(self, position: int | None) -> wire.Slot:
        """Slot for an owner that has the tokens before ``position``; None: all."""
        index = len(self.tokens) if position is None else self.index_of(position)
        return wire.Slot(slot=self.slot, output=self.index, position=self.request.prompt_len + index)

    def truncate_at(self, end_position: int) -> None:
        self.truncated_at = self.index_of(end_position)

    def add_token(self, token: Token) -> None:
        if token.logprobs is not None:
            self.logprobs[len(self.tokens)] = token.logprobs
        self.tokens.append(token.token)

    def add_early_tokens(self) -> None:
        """Add what the engine reported before the fetch returned."""
        early, self.early_tokens = self.early_tokens, []
        for token in early:
            self.add_token(token)

    def on_finished(self, event: SequenceFinished) -> None:
        self.timeline = event.timeline
        if not self.finished.done():
            self.finished.set_result(event)

    def truncate(self) -> None:
        """Drop the tokens that do not count."""
        if self.truncated_at is not None:
            del self.tokens[self.truncated_at :]


def end_of(output: Output) -> wire.OutputEnd:
    """End of an output: the engine's, or the run's cancellation."""
    event = output.finished.result() if output.finished.done() else None
    is_running = output.run.phase == wire.RunStatus.PHASE_RUNNING
    if event is None or not is_running or event.reason in (FinishReason.CANCELLED, FinishReason.FAILED):
        reason = output.run.cancel_reason or wire.OutputEnd.REASON_CANCELLED
    else:
        reason = end_reason(event.reason, output.stopping)
    return wire.OutputEnd(output=output.index, reason=reason, end_position=output.position)
