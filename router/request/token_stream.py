"""Outputs of one request: attempts write them, one client reads them at its own pace."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import RequestRecord
from decant.router.request.attempt_trace import AttemptTrace
from decant.router.request.output import Finish, Output
from decant.router.request.valid_request import ValidRequest
from decant.router.workers.subscription import WriteError
from decant.runtime.error_details import ResumePoint
from decant.runtime.errors import ServiceError
from decant.state.journal import Entry
from decant.state.logprobs import Logprobs


class SupersedableReader(Protocol):
    def supersede(self) -> None: ...


class StopListener(Protocol):
    def on_stop_string(self, output: Output) -> None: ...


Counts = Sequence[int]
"""Numbers of tokens, one for each output of a request."""


@dataclass(slots=True)
class AdoptedTail:
    """What is known here of tokens that an earlier owner of the request may have sent to the client."""

    may_lag_client: bool = False
    """It may have sent more than is here. False once a reader begins here: it supersedes all others."""
    certain_tokens: Counts | None = None
    """Leading tokens of each output that equal those it may have sent; None: all."""

    def lags(self, known: Counts, sent: Counts) -> bool:
        """Whether a client that was ``sent`` tokens has to wait for those after the ``known`` ones."""
        return self.may_lag_client and exceeds(sent, known) and not self.is_uncertain(sent)

    def is_uncertain(self, sent: Counts) -> bool:
        return self.certain_tokens is not None and exceeds(sent, self.certain_tokens)

    def mark_uncertain(self, known: Counts) -> Counts:
        """Mark what follows the ``known`` tokens as uncertain; return ``certain_tokens``."""
        before = known if self.certain_tokens is None else self.certain_tokens
        self.certain_tokens = [min(pair) for pair in zip(known, before, strict=True)]
        return self.certain_tokens


def exceeds(counts: Counts, others: Counts) -> bool:
    """Whether any output has more tokens in ``counts``."""
    return any(count > other for count, other in zip(counts, others, strict=True))


@dataclass(slots=True)
class Delivery:
    """What all readers in turn were sent; times are of the event loop's clock."""

    first_at: float | None = None
    second_at: float | None = None
    counted: int | None = None
    """Tokens in the metrics; None: they exclude the request."""


class TokenStream:
    """Outputs of a request, with the one reader that waits for them.

    The execution of the request owns it. Attempts write ``outputs``; the execution sets ``end``, after which nothing
    is written.
    """

    def __init__(self, request: ValidRequest, entries: Iterable[Entry] = ()) -> None:
        self.request = request
        tokens = defaultdict[int, list[int]](list)
        for entry in entries:
            tokens[entry.output].append(entry.token)
        self.outputs = [Output(self, index, tokens[index]) for index in range(request.num_outputs)]
        self.prompt_logprobs = Logprobs(request.output_options.prompt_logprobs or 0)
        """Of the prompt's second token and on."""
        self.cached_tokens = 0
        self.resumable = True
        self.end: Finish | ServiceError | None = None
        self.trace = AttemptTrace()
        self.tail = AdoptedTail()
        self.delivery = Delivery()
        self.reader: SupersedableReader | None = None
        self._stop_listener: StopListener | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(output.tokens) for output in self.outputs)

    @property
    def counts(self) -> Counts:
        return [len(output.tokens) for output in self.outputs]

    @property
    def finish(self) -> Finish | None:
        """Finish of the first output, once all are complete."""
        return self.outputs[0].finish if all(output.finish is not None for output in self.outputs) else None

    @property
    def resume_point(self) -> ResumePoint:
        """Where a client that has all tokens can resume."""
        return resume_point(self.counts)

    @property
    def last_token_at(self) -> float | None:
        return max((output.last_token_at for output in self.outputs if output.last_token_at is not None), default=None)

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompt's logprobs are complete or were not requested."""
        is_requested = self.request.output_options.prompt_logprobs is not None
        return not is_requested or len(self.prompt_logprobs) >= self.request.prompt_tokens - 1

    # Of attempts

    def begin_writing(self) -> None:
        for output in self.outputs:
            output.begin_writing()

    def begin_attempt(self, listener: StopListener) -> None:
        self._stop_listener = listener

    def on_stop_string(self, output: Output) -> None:
        if self._stop_listener is not None:
            self._stop_listener.on_stop_string(output)

    def add_prompt_logprobs(self, message: wire.PromptLogprobs) -> WriteError | None:
        """Add the next part; parts arrive in order, and a later attempt repeats them."""
        known, prompt_tokens = self.prompt_logprobs, self.request.prompt_tokens
        next = 1 + len(known)  # the first token has none
        if message.first_position <= next < prompt_tokens:
            try:
                known.extend(message.logprobs[next - message.first_position :][: prompt_tokens - next])
            except ValueError:
                return WriteError.MALFORMED
            self.notify()
        return None

    def mark_tail_uncertain(self) -> Counts:
        """Mark what follows the present tokens as uncertain; return the numbers of certain ones."""
        certain = self.tail.mark_uncertain(self.counts)
        self.notify()
        return certain

    # Of the reader

    def notify(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    async def wait_beyond(self, count: int) -> None:
        """Wait for more than ``count`` tokens of all outputs together, or the end."""
        while self.num_tokens <= count and self.end is None:
            await self._wait_for_change()

    async def wait_until_caught_up(self, sent: Counts) -> None:
        while self.end is None and self.tail.lags(self.counts, sent):
            await self._wait_for_change()

    async def wait_prompt_logprobs(self) -> None:
        while not self.has_prompt_logprobs and self.end is None:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


def resume_point(counts: Counts) -> ResumePoint:
    return ResumePoint(0, sum(counts), tuple(counts) if len(counts) > 1 else ())


class RecordedStream(TokenStream):
    """Stream of a request that has ended, as the store has it."""

    def __init__(self, request: ValidRequest, entries: Iterable[Entry], record: RequestRecord) -> None:
        super().__init__(request, entries)
        self.record = record
