"""Response messages of a token stream: deltas of all new tokens, up to MAX_DELTA_TOKENS, or one response."""

from __future__ import annotations

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.usage import RequestMeter
from decant.router.request.reader_lease import Write
from decant.router.request.token_stream import Finish, TokenStream
from decant.router.text.detokenizer import TokenTable
from decant.router.text.output_text import new_output_text
from decant.router.text.served_model import ServedModel
from decant.runtime.errors import ServiceError
from decant.runtime.packed import unpack

MAX_DELTA_TOKENS = 1024
"""With 20 alternatives each about 1 MiB, a quarter of the default limit of gRPC clients."""


class ResponseWriter:
    """Writer of what follows the first ``after_seq`` tokens, which the stream has."""

    __slots__ = ("_model", "_num_read", "_options", "_stream", "_text")

    def __init__(self, stream: TokenStream, model: ServedModel, after_seq: int = 0) -> None:
        self._stream = stream
        self._model = model
        self._options = options = stream.request.output_options
        self._num_read = after_seq
        self._text = new_output_text(model, options, stream.request.engine_request.stopping) if options.text else None

    async def stream(self, write: Write, meter: RequestMeter) -> Finish:
        """Write all messages. Raises the stream's error and errors of `write`."""
        stream = self._stream
        message = pb.GenerateStreamResponse(request_id=stream.request.key.id, seq=self._num_read)
        chunk = min(self._options.min_chunk_tokens, MAX_DELTA_TOKENS)
        if not self._num_read:
            await stream.wait_beyond(chunk - 1)
        elif self._text is not None:
            self._text.add(stream.tokens[: self._num_read])
        await stream.wait_prompt_logprobs()
        if stream.tokens:
            message.started.CopyFrom(self._started())
            await write(message)
        while not self._has_read_all:
            await stream.wait_beyond(self._num_read + chunk - 1)
            if tokens := self._fill_delta(message):
                await write(message)
                meter.record_sent(tokens)
        finish = self._finish()
        if self._text is not None and (rest := self._text.end()):
            message.delta.CopyFrom(pb.Delta(text=rest))
            await write(message)
        message.finished.CopyFrom(finish.finished())
        message.usage.CopyFrom(meter.usage())
        message.receipt.CopyFrom(meter.receipt())
        await write(message)
        return finish

    async def collect(self, meter: RequestMeter) -> tuple[pb.GenerateResponse, Finish]:
        stream, options = self._stream, self._options
        while stream.end is None:
            await stream.wait_beyond(len(stream.tokens))
        finish = self._finish()
        text = "" if self._text is None else options.echo + self._text.add(stream.tokens) + self._text.end()
        if stream.tokens:
            meter.record_sent(len(stream.tokens))
        output = pb.Output(
            text=text,
            token_ids=stream.tokens if options.token_ids else (),
            logprobs=self._logprobs(0, len(stream.tokens)) if options.logprobs is not None else (),
            finished=finish.finished(),
        )
        response = pb.GenerateResponse(
            request_id=stream.request.key.id,
            model=self._model.id,
            outputs=[output],
            usage=meter.usage(),
            receipt=meter.receipt(),
            seed=stream.request.engine_request.sampling.seed,
            prompt_logprobs=self._prompt_logprobs(),
        )
        return response, finish

    @property
    def _has_read_all(self) -> bool:
        return self._stream.end is not None and self._num_read == len(self._stream.tokens)

    def _fill_delta(self, message: pb.GenerateStreamResponse) -> int:
        options, read = self._options, self._num_read
        tokens = self._stream.tokens[read : read + MAX_DELTA_TOKENS]
        count = len(tokens)
        if not count:
            return 0
        self._num_read = message.seq = read + count
        delta = message.delta
        delta.num_tokens = count
        if self._text is not None:
            text = self._text.add(tokens)
            delta.text = text if read else options.echo + text
        if options.token_ids:
            delta.token_ids[:] = tokens
        if options.logprobs is not None:
            del delta.logprobs[:]
            delta.logprobs.extend(self._logprobs(read, read + count))
        return count

    def _finish(self) -> Finish:
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
        stream, table = self._stream, self._model.token_table
        pairs = zip(stream.tokens[first:end], stream.logprobs.entries(first, end), strict=True)
        return [_logprob(table, token, logprobs) for token, logprobs in pairs]

    def _prompt_logprobs(self) -> list[pb.TokenLogprob]:
        request, known, table = self._stream.request, self._stream.prompt_logprobs, self._model.token_table
        if request.output_options.prompt_logprobs is None:
            return []
        first, *others = unpack(request.engine_request.prompt)
        exact = table.bytes_of(first)
        begin = pb.TokenLogprob(token_id=first, token=exact.decode(errors="replace"), token_bytes=exact)
        return [begin, *(_logprob(table, token, logprobs) for token, logprobs in zip(others, known, strict=False))]


def _logprob(table: TokenTable, token: int, logprobs: wire.TokenLogprobs) -> pb.TokenLogprob:
    exact = table.bytes_of(token)
    return pb.TokenLogprob(
        token_id=token,
        token=exact.decode(errors="replace"),
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[
            pb.TopLogprob(token_id=id, token=bytes_.decode(errors="replace"), logprob=logprob, token_bytes=bytes_)
            for id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            for bytes_ in (table.bytes_of(id),)
        ],
        token_bytes=exact,
    )
