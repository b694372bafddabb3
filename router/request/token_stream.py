"""Output of one request: attempts write it, one client reads it at its own pace. It holds token ids, never messages."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from decant.protos import inference_pb2 as pb
from decant.protos.state_pb2 import RequestRecord, WorkerRegistration
from decant.router.request.valid_request import ValidRequest
from decant.runtime.errors import ServiceError
from decant.state.ids import Incarnation
from decant.state.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class Finish:
    reason: pb.FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None

    def finished(self) -> pb.Finished:
        return pb.Finished(
            finish_reason=self.reason,
            eos_token_id=self.eos_token_id,
            stop_token_id=self.stop_token_id,
            stop_string=self.stop_string,
        )


@dataclass(slots=True)
class AttemptTrace:
    """Workers and times of the last attempt: seconds, ``*_at`` in event loop time; None: did not happen.

    The only place that knows which workers have the run: the record, the receipt, the log and the span derive from it.
    """

    attempts: int = 1
    prefill: WorkerRegistration | None = None
    decode: WorkerRegistration | None = None
    scheduled_at: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_wait_s: float | None = None
    decode_began_at: float | None = None
    handoff_bytes: int = 0

    @property
    def prefill_worker(self) -> str:
        return "" if self.prefill is None else self.prefill.peer.id

    @property
    def decode_worker(self) -> str:
        return "" if self.decode is None else self.decode.peer.id

    @property
    def workers(self) -> list[Incarnation]:
        return [Incarnation.of(worker.peer) for worker in (self.prefill, self.decode) if worker is not None]


class SupersedableReader(Protocol):
    def supersede(self) -> None: ...


@dataclass(slots=True)
class TokenStream:
    request: ValidRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(init=False)  # one per token, if requested
    prompt_logprobs: Logprobs = field(init=False)  # of the prompt's second token and on
    cached_tokens: int = 0
    resumable: bool = True
    may_lag_client: bool = False
    """An earlier owner may have sent more than is here. False once a reader begins here: it supersedes all others."""
    certain_tokens: int | None = None
    """Leading tokens that equal those an earlier owner may have sent; None: all."""
    trace: AttemptTrace = field(default_factory=AttemptTrace)
    end: Finish | ServiceError | None = None
    last_token_at: float | None = None  # the event loop's clock
    reader: SupersedableReader | None = None
    first_sent_at: float | None = None  # to any reader, by the event loop's clock
    second_sent_at: float | None = None
    recorded: RequestRecord | None = None
    """Record of a replayed request."""
    counted: int | None = None
    """Tokens in the metrics; None: they exclude the request."""
    _waiter: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        options = self.request.output_options
        self.logprobs = Logprobs(options.logprobs or 0)
        self.prompt_logprobs = Logprobs(options.prompt_logprobs or 0)

    def notify(self) -> None:
        if self._waiter is not None:
            waiter, self._waiter = self._waiter, None
            if not waiter.done():
                waiter.set_result(None)

    async def wait_beyond(self, count: int) -> None:
        while len(self.tokens) <= count and self.end is None:
            await self._wait_for_change()

    async def wait_until_caught_up(self, seq: int) -> None:
        while self.may_lag_client and len(self.tokens) < seq and self.end is None:
            if self.certain_tokens is not None and seq > self.certain_tokens:
                return
            await self._wait_for_change()

    def mark_tail_uncertain(self) -> int:
        """Mark what follows the present tokens as uncertain; return ``certain_tokens``."""
        count = len(self.tokens)
        self.certain_tokens = certain = count if self.certain_tokens is None else min(count, self.certain_tokens)
        self.notify()
        return certain

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompt's logprobs are complete or were not requested."""
        is_requested = self.request.output_options.prompt_logprobs is not None
        return not is_requested or len(self.prompt_logprobs) >= self.request.prompt_tokens - 1

    async def wait_prompt_logprobs(self) -> None:
        while not self.has_prompt_logprobs and self.end is None:
            await self._wait_for_change()

    async def _wait_for_change(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
