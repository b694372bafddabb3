"""Tokens into a course, from whoever brings them first.

    known     | t0 | t1 | t2 |
    comes               | t2 | t3 |     t2 is dropped, t3 is written
    comes                         | t5 |     a gap: it is asked for again
    comes          | x1 |               another token for a known place: an error, never shown

The token that completes a stop text is the last: what comes after it is dropped. Text is followed here, whether or not
anybody reads it, and only where there are such texts. This is the path of every token: no call more than needed.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.execution.token_stream import Finish, TokenStream
from decant.router.workers.token_sink import WriteError
from decant.state.logprobs import Logprobs


class StopListener(Protocol):
    """Is notified when a token completes a stop string: the attempt that runs."""

    def on_stop_string(self) -> None: ...


class TokenWriter:
    """The one writer of a course's tokens. A course that has ended, or is stopped, is written no more."""

    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.stopped: Finish | None = None
        """Set by the token that completed a stop text."""
        self.listener: StopListener | None = None
        begin = stream.request.new_output_text
        self._text = begin() if begin is not None else None
        self._tokens = stream.tokens
        self._base = stream.request.prompt_tokens
        self._limit = stream.request.engine_request.stopping.max_tokens
        self._vocab_size = stream.request.vocab_size
        self._logprobs = stream.logprobs if stream.request.output_options.logprobs is not None else None
        self._now = asyncio.get_running_loop().time
        for token in stream.tokens:  # of an earlier owner's
            self._follow(token)

    @property
    def position(self) -> int:
        """Of the first token that is lacking."""
        return self._base + len(self._tokens)

    @property
    def end_limit(self) -> int:
        """The position after the last token that may be written."""
        return self._base + self._limit

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None:
        tokens = self._tokens
        index = position - self._base
        if index == len(tokens):
            stream = self.stream
            if token >= self._vocab_size or index >= self._limit:
                return WriteError.MALFORMED
            if stream.end is None and self.stopped is None:
                if self._logprobs is not None and not _copied(logprobs, self._logprobs):
                    return WriteError.MALFORMED
                tokens.append(token)
                stream.last_token_at = self._now()
                if self._text is not None:
                    self._follow(token)
                stream.notify()
            return None
        if index > len(tokens):
            return WriteError.GAP if self.stopped is None else None
        return None if index >= 0 and tokens[index] == token else WriteError.CONFLICT

    def add_prompt_logprobs(self, message: wire.PromptLogprobs) -> WriteError | None:
        """Logprobs of a part of the prompt. They come in order; an attempt that starts over says them again."""
        known = self.stream.prompt_logprobs
        next = 1 + len(known)  # the first token has none
        if message.first_position <= next < self._base:
            try:
                known.extend(message.logprobs[next - message.first_position :][: self._base - next])
            except ValueError:
                return WriteError.MALFORMED
            self.stream.notify()
        return None

    def _follow(self, token: int) -> None:
        if self._text is None:
            return
        self._text.add((token,))
        if self._text.stop is not None:
            self.stopped = Finish(pb.FINISH_REASON_STOP, stop_text=self._text.stop)
            self._text = None
            if self.listener is not None:
                self.listener.on_stop_string()


def _copied(logprobs: wire.TokenLogprobs | None, known: Logprobs) -> bool:
    """Whether a token's logprobs are there and well formed; they are appended to ``known`` then."""
    if logprobs is None:
        return False
    try:
        known.append(logprobs)
    except ValueError:
        return False
    return True
