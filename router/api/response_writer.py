"""A token stream as its client reads it: a stream of messages, or one response.

    stream: tokens t0 t1 t2 t3 t4 ... end        read at the client's pace
            started, delta(t0), delta(t1 t2 t3), delta(t4 and what was held back), finished

All tokens that are there go into one delta, up to MAX_DELTA_TOKENS, so a slow reader gets fewer and larger ones. What
text a token adds is decided by the tokens and the request alone: one that stops has none, and the last that can be
written brings what was held back, whether or not the end is known yet. So a reader may begin after any token, and gets
the rest of the same text.
"""

from __future__ import annotations

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.usage import RequestMeter
from decant.router.request.reader_lease import Write
from decant.router.request.token_stream import Finish, TokenStream
from decant.router.text.detokenizer import TokenTable
from decant.router.text.output_text import new_output_text
from decant.router.text.served_model import ServedModel
from decant.runtime.errors import InvalidArgument, ServiceError
from decant.runtime.packed import unpack

MAX_DELTA_TOKENS = 1024
"""In one message: with 20 alternatives each about 1 MiB, a quarter of what gRPC's clients receive by default."""


class ResponseWriter:
    """Reads a token stream once; ``stream`` begins after the ``after_seq`` tokens that the client has."""

    __slots__ = ("_model", "_read", "_stream", "_text", "_wanted")

    def __init__(self, stream: TokenStream, model: ServedModel, after_seq: int = 0) -> None:
        self._stream = stream
        self._model = model
        self._wanted = wanted = stream.request.output_options
        self._read = after_seq
        self._text = new_output_text(model, wanted, stream.request.engine_request.stopping) if wanted.text else None

    async def stream(self, write: Write, account: RequestMeter) -> Finish:
        """Writes all messages; returns how it ended. Raises the stream's error, what `write` raises, and
        InvalidArgument where the stream ends before `after_seq`."""
        stream = self._stream
        message = pb.GenerateStreamResponse(request_id=stream.request.key.id, seq=self._read)
        chunk = min(self._wanted.min_chunk_tokens, MAX_DELTA_TOKENS)
        await stream.wait_beyond(self._read - 1 if self._read else chunk - 1)
        self._skip(self._read)
        await stream.wait_prompt_logprobs()
        if stream.tokens:
            message.started.CopyFrom(self._started())
            await write(message)
        while not self._is_read:
            await stream.wait_beyond(self._read + chunk - 1)
            if tokens := self._fill_delta(message):
                await write(message)
                account.sent(tokens)
        ended = self._ended()
        if self._text is not None and (rest := self._text.end()):
            message.delta.CopyFrom(pb.Delta(text=rest))
            await write(message)
        message.finished.CopyFrom(ended.finished())
        message.usage.CopyFrom(account.usage())
        message.receipt.CopyFrom(account.receipt())
        await write(message)
        return ended

    async def whole(self, account: RequestMeter) -> tuple[pb.GenerateResponse, Finish]:
        """The whole output in one response, and how it ended. Raises the stream's error."""
        stream, wanted = self._stream, self._wanted
        while stream.end is None:
            await stream.wait_beyond(len(stream.tokens))
        ended = self._ended()
        text = "" if self._text is None else wanted.echo + self._text.add(stream.tokens) + self._text.end()
        if stream.tokens:
            account.sent(len(stream.tokens))
        output = pb.Output(
            text=text,
            token_ids=stream.tokens if wanted.token_ids else (),
            logprobs=self._logprobs(0, len(stream.tokens)) if wanted.logprobs is not None else (),
            finished=ended.finished(),
        )
        response = pb.GenerateResponse(
            request_id=stream.request.key.id,
            model=self._model.id,
            outputs=[output],
            usage=account.usage(),
            receipt=account.receipt(),
            seed=stream.request.engine_request.sampling.seed,
            prompt_logprobs=self._prompt_logprobs(),
        )
        return response, ended

    @property
    def _is_read(self) -> bool:
        return self._stream.end is not None and self._read == len(self._stream.tokens)

    def _skip(self, count: int) -> None:
        """Skip tokens that the client has, and their text."""
        tokens = self._stream.tokens
        if count > len(tokens):
            self._ended()
            raise InvalidArgument("after_seq", f"at most {len(tokens)}, which is all that was written", count)
        if self._text is not None:
            self._text.add(tokens[:count])

    def _fill_delta(self, message: pb.GenerateStreamResponse) -> int:
        """Make `message` the delta of the unread tokens, up to MAX_DELTA_TOKENS; returns their number. This is the work
        per token: it reuses the parts of the message."""
        wanted, read = self._wanted, self._read
        tokens = self._stream.tokens[read : read + MAX_DELTA_TOKENS]
        count = len(tokens)
        if not count:
            return 0
        self._read = message.seq = read + count
        delta = message.delta
        delta.num_tokens = count
        if self._text is not None:
            text = self._text.add(tokens)
            delta.text = text if read else wanted.echo + text
        if wanted.token_ids:
            delta.token_ids[:] = tokens
        if wanted.logprobs is not None:
            del delta.logprobs[:]
            delta.logprobs.extend(self._logprobs(read, read + count))
        return count

    def _ended(self) -> Finish:
        """How the output ended. Raises the stream's error."""
        end = self._stream.end
        if isinstance(end, ServiceError):
            raise end
        assert end is not None
        return end

    def _started(self) -> pb.Started:
        stream = self._stream
        return pb.Started(
            model=self._model.id,
            prompt_tokens=stream.request.prompt_tokens,
            cached_tokens=stream.cached_tokens,
            seed=stream.request.engine_request.sampling.seed,
            prompt_logprobs=self._prompt_logprobs(),
            resumable=stream.resumable,
        )

    def _logprobs(self, first: int, end: int) -> list[pb.TokenLogprob]:
        stream, words = self._stream, self._model.token_table
        pairs = zip(stream.tokens[first:end], stream.logprobs.entries(first, end), strict=True)
        return [_logprob(words, token, logprobs) for token, logprobs in pairs]

    def _prompt_logprobs(self) -> list[pb.TokenLogprob]:
        """One per token of the prompt; the first follows nothing and has no logprob."""
        request, found, words = self._stream.request, self._stream.prompt_logprobs, self._model.token_table
        if request.output_options.prompt_logprobs is None:
            return []
        first, *others = unpack(request.engine_request.prompt)
        exact = words.bytes_of(first)
        begin = pb.TokenLogprob(token_id=first, token=exact.decode(errors="replace"), token_bytes=exact)
        return [begin, *(_logprob(words, token, logprobs) for token, logprobs in zip(others, found, strict=False))]


def _logprob(words: TokenTable, token: int, found: wire.TokenLogprobs) -> pb.TokenLogprob:
    exact = words.bytes_of(token)
    return pb.TokenLogprob(
        token_id=token,
        token=exact.decode(errors="replace"),
        logprob=found.logprob,
        rank=found.rank,
        top=[
            pb.TopLogprob(token_id=id, token=bytes_.decode(errors="replace"), logprob=logprob, token_bytes=bytes_)
            for id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
            for bytes_ in (words.bytes_of(id),)
        ],
        token_bytes=exact,
    )
