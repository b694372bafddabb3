"""What a request is on its way through the router: asked for, valid, and written.

    raw GenerateRequest --validation--> ValidRequest --dispatch--> Course <--answer-- the client's stream

``dispatch`` writes a course, whoever answers the client reads it at his own pace. A course keeps token ids, never
messages: a stream that nobody reads costs four bytes a token or so.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Protocol

from decant.protos import inference_pb2 as pb
from decant.protos.state_pb2 import RequestRecord
from decant.router.execution.valid_request import ValidRequest
from decant.runtime.errors import ServiceError
from decant.state.logprobs import Logprobs


@dataclass(frozen=True, slots=True)
class Finish:
    """A request that ended well: why it wrote its last token."""

    reason: pb.FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_text: str | None = None

    def finished(self) -> pb.Finished:
        """As clients are told."""
        return pb.Finished(
            finish_reason=self.reason,
            eos_token_id=self.eos_token_id,
            stop_token_id=self.stop_token_id,
            stop_text=self.stop_text,
        )


@dataclass(slots=True)
class AttemptTrace:
    """The account of the attempt that is under way, for the receipt: who did what, and when by this router's clock.

    Seconds; ``*_at`` on the event loop's clock. What never happened is None.
    """

    attempts: int = 1
    prefill_worker: str = ""
    decode_worker: str = ""
    scheduled_at: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    handoff_s: float | None = None
    decode_wait_s: float | None = None
    decode_began_at: float | None = None
    handoff_bytes: int = 0


class SupersedableReader(Protocol):
    """Who reads a course now."""

    def supersede(self) -> None:
        """A newer one reads it."""


@dataclass(slots=True)
class TokenStream:
    """One request being answered. One output; dispatch is the only writer, and there is one reader at a time."""

    request: ValidRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: Logprobs = field(init=False)  # one per token, where asked for
    prompt_logprobs: Logprobs = field(init=False)  # of the prompt's second token and on
    cached_tokens: int = 0
    resumable: bool = True
    may_lag_client: bool = False
    """Another router may have shown more of it than is written here. Who begins to read what is written here ends that:
    those who read before him are superseded."""
    certain_tokens: int | None = None
    """Tokens that another router's readers can't have seen otherwise; None: all."""
    path: AttemptTrace = field(default_factory=AttemptTrace)
    end: Finish | ServiceError | None = None
    last_token_at: float | None = None  # the event loop's clock
    reader: SupersedableReader | None = None
    first_sent_at: float | None = None  # the event loop's clock, whoever read it first
    second_sent_at: float | None = None
    recorded: RequestRecord | None = None
    """Of one that is replayed: what was told at its end."""
    counted: int | None = None
    """Tokens that the metrics have counted; None: nothing of this request was."""
    _waiting: asyncio.Future[None] | None = None

    def __post_init__(self) -> None:
        wanted = self.request.output_options
        self.logprobs = Logprobs(wanted.logprobs or 0)
        self.prompt_logprobs = Logprobs(wanted.prompt_logprobs or 0)

    def notify(self) -> None:
        """Something was written, or it ended: whoever waits looks again."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            if not waiting.done():
                waiting.set_result(None)

    async def wait_beyond(self, count: int) -> None:
        """Wait until more than ``count`` tokens are written, or the end is. One reader at a time."""
        while len(self.tokens) <= count and self.end is None:
            await self._news()

    async def wait_until_caught_up(self, seq: int) -> None:
        """Wait until so many tokens are written of a course that is behind, or can't be those that were shown."""
        while self.may_lag_client and len(self.tokens) < seq and self.end is None:
            if self.certain_tokens is not None and seq > self.certain_tokens:
                return
            await self._news()

    def mark_tail_uncertain(self) -> int:
        """What comes now may be other tokens than an earlier owner has shown; how many are certain."""
        written = len(self.tokens)
        self.certain_tokens = certain = written if self.certain_tokens is None else min(written, self.certain_tokens)
        self.notify()
        return certain

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompt's logprobs are all here, where they were asked for."""
        asked = self.request.output_options.prompt_logprobs is not None
        return not asked or len(self.prompt_logprobs) >= self.request.prompt_tokens - 1

    async def wait_prompt_logprobs(self) -> None:
        """Wait until the prompt's logprobs are all here, where they were asked for, or the end is."""
        while not self.has_prompt_logprobs and self.end is None:
            await self._news()

    async def _news(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        await self._waiting
