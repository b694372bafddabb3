"""One output of a request. It holds token ids, never messages.

The first token for a position counts: a duplicate is dropped, a gap is requested again, and another token for a known
position is an error. Nothing is written after the output's finish or the request's end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.workers.subscription import WriteError
from decant.state.logprobs import Logprobs

if TYPE_CHECKING:
    from decant.router.request.token_stream import TokenStream
    from decant.router.text.answer import Answer


@dataclass(frozen=True, slots=True)
class Finish:
    """Why an output is complete, as its client gets it."""

    reason: pb.FinishReason
    eos_token_id: int | None = None
    stop_token_id: int | None = None
    stop_string: str | None = None
    guide_completed: bool = False

    def finished(self, index: int = 0) -> pb.Finished:
        """Message for the output with this index."""
        return pb.Finished(
            index=index,
            finish_reason=self.reason,
            eos_token_id=self.eos_token_id,
            stop_token_id=self.stop_token_id,
            stop_string=self.stop_string,
            guide_completed=self.guide_completed,
        )


class Output:
    """Tokens of an output, with their logprobs if requested, and its finish once that is known.

    The stream's attempts write it through ``write``, from ``begin_writing`` on.
    """

    def __init__(self, stream: TokenStream, index: int, tokens: Iterable[int] = ()) -> None:
        request = stream.request
        self.index = index
        self.tokens = list(tokens)
        self.logprobs = Logprobs(request.output_options.logprobs or 0)
        """One for each token, if requested."""
        self.finish: Finish | None = None
        self.last_token_at: float | None = None  # the event loop's clock
        self._stream = stream
        self._text: Answer | None = None
        """Answer in whose text stop strings are searched; None without stop strings, and after one."""
        self._base = request.prompt_tokens
        self._limit = request.engine_request.stopping.max_tokens
        self._vocab_size = request.vocab_size
        self._has_logprobs = request.engine_request.HasField("logprobs")
        self._now = asyncio.get_running_loop().time

    def begin_writing(self) -> None:
        """Search the known tokens for stop strings, and those that are written from now on."""
        new_answer = self._stream.request.new_answer
        self._text = None if new_answer is None else new_answer()
        for token in self.tokens:
            self._search_stop_string(token)

    @property
    def mean_logprob(self) -> float:
        """Of its tokens, if they have logprobs."""
        entries = self.logprobs.entries()
        return sum(entry.logprob for entry in entries) / max(1, len(entries))

    @property
    def is_stopped_here(self) -> bool:
        """Whether a stop string ended it, which no worker sees."""
        return self.finish is not None and self.finish.stop_string is not None

    @property
    def position(self) -> int:
        """Position of the first missing token."""
        return self._base + len(self.tokens)

    @property
    def end_limit(self) -> int:
        """Position after the last token that may be written."""
        return self._base + self._limit

    def write(self, position: int, token: int, logprobs: wire.TokenLogprobs | None = None) -> WriteError | None:
        """Write a token. This runs for every token, so it avoids calls."""
        tokens = self.tokens
        index = position - self._base
        if index == len(tokens):
            if token >= self._vocab_size or index >= self._limit:
                return WriteError.MALFORMED
            stream = self._stream
            if self.finish is None and stream.end is None:
                if self._has_logprobs and not _append(logprobs, self.logprobs):
                    return WriteError.MALFORMED
                tokens.append(token)
                self.last_token_at = self._now()
                if self._text is not None:
                    self._search_stop_string(token)
                stream.notify()
            return None
        if index > len(tokens):
            return WriteError.GAP if self.finish is None else None
        return None if index >= 0 and tokens[index] == token else WriteError.CONFLICT

    def _search_stop_string(self, token: int) -> None:
        if self._text is None:
            return
        self._text.add((token,))
        if self._text.stop is not None:
            self.finish = Finish(pb.FINISH_REASON_STOP, stop_string=self._text.stop)
            self._text = None
            self._stream.on_stop_string(self)


def _append(logprobs: wire.TokenLogprobs | None, known: Logprobs) -> bool:
    if logprobs is None:
        return False
    try:
        known.append(logprobs)
    except ValueError:
        return False
    return True
