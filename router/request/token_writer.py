"""Writer of workers' tokens into a stream: the first token for a position counts.

A duplicate is dropped, a gap is requested again, and another token for a known position is an error. Nothing is written
after the end or a stop string. ``write`` runs for every token, so it avoids calls.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.request.token_stream import Finish, TokenStream
from decant.router.workers.subscription import WriteError
from decant.state.logprobs import Logprobs


class StopListener(Protocol):
    def on_stop_string(self) -> None: ...


class TokenWriter:
    def __init__(self, stream: TokenStream) -> None:
        self.stream = stream
        self.stopped: Finish | None = None
        self._listener: StopListener | None = None
        new_text = stream.request.new_output_text
        self._text = new_text() if new_text is not None else None
        self._tokens = stream.tokens
        self._base = stream.request.prompt_tokens
        self._limit = stream.request.engine_request.stopping.max_tokens
        self._vocab_size = stream.request.vocab_size
        self._logprobs = stream.logprobs if stream.request.output_options.logprobs is not None else None
        self._now = asyncio.get_running_loop().time
        for token in stream.tokens:  # of an earlier owner's
            self._search_stop_string(token)

    def begin_attempt(self, listener: StopListener) -> None:
        self._listener = listener

    @property
    def position(self) -> int:
        return self._base + len(self._tokens)

    @property
    def end_limit(self) -> int:
        return self._base + self._limit

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None:
        tokens = self._tokens
        index = position - self._base
        if index == len(tokens):
            stream = self.stream
            if token >= self._vocab_size or index >= self._limit:
                return WriteError.MALFORMED
            if stream.end is None and self.stopped is None:
                if self._logprobs is not None and not _append(logprobs, self._logprobs):
                    return WriteError.MALFORMED
                tokens.append(token)
                stream.last_token_at = self._now()
                if self._text is not None:
                    self._search_stop_string(token)
                stream.notify()
            return None
        if index > len(tokens):
            return WriteError.GAP if self.stopped is None else None
        return None if index >= 0 and tokens[index] == token else WriteError.CONFLICT

    def add_prompt_logprobs(self, message: wire.PromptLogprobs) -> WriteError | None:
        """Add the next part; parts arrive in order, and a later attempt repeats them."""
        known = self.stream.prompt_logprobs
        next = 1 + len(known)  # the first token has none
        if message.first_position <= next < self._base:
            try:
                known.extend(message.logprobs[next - message.first_position :][: self._base - next])
            except ValueError:
                return WriteError.MALFORMED
            self.stream.notify()
        return None

    def _search_stop_string(self, token: int) -> None:
        if self._text is None:
            return
        self._text.add((token,))
        if self._text.stop is not None:
            self.stopped = Finish(pb.FINISH_REASON_STOP, stop_string=self._text.stop)
            self._text = None
            if self._listener is not None:
                self._listener.on_stop_string()


def _append(logprobs: wire.TokenLogprobs | None, known: Logprobs) -> bool:
    if logprobs is None:
        return False
    try:
        known.append(logprobs)
    except ValueError:
        return False
    return True
