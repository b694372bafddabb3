"""Response messages of a token stream: deltas of all new tokens, up to MAX_DELTA_TOKENS, or one response."""

from __future__ import annotations

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.api.usage import RequestMeter
from decant.router.request.output import Finish, Output
from decant.router.request.reader_lease import Write
from decant.router.request.token_stream import Counts, TokenStream
from decant.router.text.answer import new_answer
from decant.router.text.detokenizing.token_table import TokenTable
from decant.router.text.served_model import ServedModel
from decant.router.text.tools.call_parser import Parsed, whole_calls
from decant.runtime.errors import ServiceError
from decant.runtime.packed import unpack
from decant.state.owned import returns_best

MAX_DELTA_TOKENS = 1024
"""With 20 alternatives each about 1 MiB, a quarter of the default limit of gRPC clients."""


class OutputReader:
    """Reader of one output: its text, from the tokens after the first ``num_read``."""

    __slots__ = ("_answer", "_model", "_options", "is_finished", "num_read", "output")

    def __init__(self, stream: TokenStream, output: Output, model: ServedModel, num_read: int = 0) -> None:
        self.output = output
        self.num_read = num_read
        self.is_finished = False  # its end has been written
        self._model = model
        self._options = options = stream.request.output_options
        stopping = stream.request.engine_request.stopping
        self._answer = new_answer(model, options, stopping, output.index) if options.text else None
        if self._answer is not None and num_read:
            self._answer.add(output.tokens[:num_read])

    @property
    def has_read_all(self) -> bool:
        return self.num_read == len(self.output.tokens)

    def fill_delta(self, delta: pb.Delta) -> int:
        """Fill ``delta`` with new tokens; return their number."""
        options, read = self._options, self.num_read
        tokens = self.output.tokens[read : read + MAX_DELTA_TOKENS]
        count = len(tokens)
        if not count:
            return 0
        self.num_read = read + count
        delta.index = self.output.index
        delta.num_tokens = count
        delta.output_seq = self.num_read
        if self._answer is not None:
            parsed = self._answer.add(tokens)
            delta.text = parsed.text if read else options.echo + parsed.text
            delta.reasoning = parsed.reasoning
            del delta.tool_calls[:]
            delta.tool_calls.extend(parsed.calls)
        if options.token_ids:
            delta.token_ids[:] = tokens
        if options.logprobs is not None:
            del delta.logprobs[:]
            delta.logprobs.extend(self._logprobs(read, read + count))
        return count

    def flush_text(self) -> Parsed:
        """What was held back; called once, after the last token."""
        return Parsed() if self._answer is None else self._answer.finish()

    def all_so_far(self, index: int) -> pb.Output:
        """The output as one message: what is there now, as the output ``index`` of the answer."""
        options, tokens, finish = self._options, self.output.tokens, self.output.finish
        message = pb.Output(index=index, token_ids=tokens if options.token_ids else ())
        if self._answer is not None and (tokens or finish is not None):
            parsed = self._answer.add(tokens)
            if finish is not None:
                parsed.extend(self._answer.finish())
            message.text = options.echo + parsed.text
            message.reasoning = parsed.reasoning
            message.tool_calls.extend(whole_calls(parsed.calls))
        if options.logprobs is not None:
            message.logprobs.extend(self._logprobs(0, len(tokens)))
        if finish is not None:
            message.finished.CopyFrom(finish.finished(index))
        return message

    def _logprobs(self, first: int, end: int) -> list[pb.TokenLogprob]:
        output, table = self.output, self._model.token_table
        pairs = zip(output.tokens[first:end], output.logprobs.entries(first, end), strict=True)
        return [token_logprob(table, token, logprobs) for token, logprobs in pairs]


class ResponseWriter:
    """Writer of what follows the ``sent`` tokens of each output, which the stream has; by default of all tokens."""

    __slots__ = ("_model", "_readers", "_stream")

    def __init__(self, stream: TokenStream, model: ServedModel, sent: Counts = ()) -> None:
        self._stream = stream
        self._model = model
        sent = sent or [0] * len(stream.outputs)
        self._readers = [
            OutputReader(stream, output, model, count) for output, count in zip(stream.outputs, sent, strict=True)
        ]

    async def stream(self, write: Write, meter: RequestMeter) -> Finish:
        """Write all messages. Raises the stream's error and errors of `write`."""
        stream, readers = self._stream, self._readers
        message = pb.GenerateStreamResponse(request_id=stream.request.key.id, seq=self._num_read)
        chunk = min(stream.request.output_options.min_chunk_tokens, MAX_DELTA_TOKENS)
        if not message.seq:
            await stream.wait_beyond(chunk - 1)
        await stream.wait_prompt_logprobs()
        if stream.num_tokens:
            message.started.CopyFrom(self._started())
            await write(message)
        while stream.end is None or not all(reader.has_read_all for reader in readers):
            await stream.wait_beyond(message.seq + chunk - 1)
            for reader in readers:
                if tokens := reader.fill_delta(message.delta):
                    message.seq += tokens
                    await write(message)
                    meter.record_sent(tokens)
            await self._write_ends(message, write)
        finish = self._finish()
        await self._write_ends(message, write, meter)
        return finish

    @property
    def _num_read(self) -> int:
        return sum(reader.num_read for reader in self._readers)

    async def _write_ends(
        self, message: pb.GenerateStreamResponse, write: Write, meter: RequestMeter | None = None
    ) -> None:
        """Write the ends of outputs that were read whole; the last one with usage and receipt, which ``meter`` has."""
        left = [reader for reader in self._readers if not reader.is_finished]
        num_left = len(left)
        for reader in left:
            finish, is_last = reader.output.finish, num_left == 1
            if finish is None or not reader.has_read_all or (is_last and meter is None):
                continue
            reader.is_finished = True
            num_left -= 1
            rest = reader.flush_text()
            if not rest.is_empty:
                delta = pb.Delta(index=reader.output.index, text=rest.text, reasoning=rest.reasoning)
                delta.output_seq = reader.num_read
                delta.tool_calls.extend(rest.calls)
                message.delta.CopyFrom(delta)
                await write(message)
            message.finished.CopyFrom(finish.finished(reader.output.index))
            if is_last and meter is not None:
                message.usage.CopyFrom(meter.usage())
                message.receipt.CopyFrom(meter.receipt())
            await write(message)

    async def collect(self, meter: RequestMeter) -> tuple[pb.GenerateResponse, Finish]:
        stream = self._stream
        while stream.end is None:
            await stream.wait_beyond(stream.num_tokens)
        finish = self._finish()
        if stream.num_tokens:
            meter.record_sent(stream.num_tokens)
        response = self.response_so_far()
        response.usage.CopyFrom(meter.usage())
        response.receipt.CopyFrom(meter.receipt())
        return response, finish

    def response_so_far(self) -> pb.GenerateResponse:
        """The outputs as they are now; the caller adds usage and receipt."""
        stream = self._stream
        return pb.GenerateResponse(
            request_id=stream.request.key.id,
            model=self._model.id,
            outputs=[reader.all_so_far(index) for index, reader in enumerate(self._returned())],
            seed=stream.request.engine_request.sampling.seed,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _returned(self) -> list[OutputReader]:
        """Readers of the outputs that the client gets: all, or the best ones, the best first."""
        payload = self._stream.request.payload
        if not returns_best(payload):
            return self._readers
        best = sorted(self._readers, key=lambda reader: reader.output.mean_logprob, reverse=True)
        return best[: max(1, payload.sampling.n)]

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

    def _prompt_logprobs(self) -> list[pb.TokenLogprob]:
        request, known, table = self._stream.request, self._stream.prompt_logprobs, self._model.token_table
        if request.output_options.prompt_logprobs is None:
            return []
        first, *others = unpack(request.engine_request.prompt)
        exact = table.bytes_of(first)
        begin = pb.TokenLogprob(token_id=first, token=exact.decode(errors="replace"), raw_bytes=exact)
        return [begin, *(token_logprob(table, token, logprobs) for token, logprobs in zip(others, known, strict=False))]


def token_logprob(table: TokenTable, token: int, logprobs: wire.TokenLogprobs) -> pb.TokenLogprob:
    exact = table.bytes_of(token)
    return pb.TokenLogprob(
        token_id=token,
        token=exact.decode(errors="replace"),
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top=[
            pb.TopLogprob(token_id=id, token=bytes_.decode(errors="replace"), logprob=logprob, raw_bytes=bytes_)
            for id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            for bytes_ in (table.bytes_of(id),)
        ],
        raw_bytes=exact,
    )
