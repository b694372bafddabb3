"""Responses of ``decant.v1`` as vLLM's: token ids and their logprobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence

from decant.protos import inference_pb2 as pb
from decant.protos.vllm import vllm_engine_pb2 as vllm

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_CONTEXT_LENGTH: "length",
}

WriteVllm = Callable[[vllm.GenerateResponse], Awaitable[None]]


class ChunkWriter:
    """Writer of a stream: chunks with the new tokens of an output, and at its end one message with all of them.

    ``waiting`` is a response without chunk and end, which gateways skip.
    """

    def __init__(self, write: WriteVllm) -> None:
        self._write = write
        self._tokens: defaultdict[int, list[int]] = defaultdict(list)
        self._started = pb.Started()

    async def write(self, message: pb.GenerateStreamResponse) -> None:
        match message.WhichOneof("event"):
            case "started":
                self._started.CopyFrom(message.started)
            case "delta":
                await self._write(vllm.GenerateResponse(chunk=self._chunk(message.delta)))
            case "waiting":
                await self._write(vllm.GenerateResponse())
            case "finished":
                if message.HasField("usage"):
                    self._started.prompt_tokens = message.usage.prompt_tokens
                    self._started.cached_tokens = message.usage.cached_prompt_tokens
                await self._write(vllm.GenerateResponse(complete=self._complete(message.finished)))

    def _chunk(self, delta: pb.Delta) -> vllm.GenerateStreamChunk:
        tokens = self._tokens[delta.index]
        is_first = not tokens
        tokens += delta.token_ids
        return vllm.GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._started.prompt_tokens,
            completion_tokens=len(delta.token_ids),  # of this chunk, as vLLM's
            cached_tokens=self._started.cached_tokens,
            output_logprobs=_output_logprobs(delta.logprobs),
            input_logprobs=_input_logprobs(self._started.prompt_logprobs) if is_first else None,
            index=delta.index,
        )

    def _complete(self, finished: pb.Finished) -> vllm.GenerateComplete:
        tokens = self._tokens[finished.index]
        complete = _complete(finished, tokens)
        complete.prompt_tokens = self._started.prompt_tokens
        complete.cached_tokens = self._started.cached_tokens
        return complete


def complete_responses(response: pb.GenerateResponse) -> Iterator[vllm.GenerateResponse]:
    """The messages of a call that does not stream: one for each output."""
    for output in response.outputs:
        complete = _complete(output.finished, output.token_ids)
        complete.index = output.index
        complete.prompt_tokens = response.usage.prompt_tokens
        complete.cached_tokens = response.usage.cached_prompt_tokens
        if (logprobs := _output_logprobs(output.logprobs)) is not None:
            complete.output_logprobs.CopyFrom(logprobs)
        if (prompt := _input_logprobs(response.prompt_logprobs)) is not None:
            complete.input_logprobs.CopyFrom(prompt)
        yield vllm.GenerateResponse(complete=complete)


def _complete(finished: pb.Finished, tokens: Sequence[int]) -> vllm.GenerateComplete:
    complete = vllm.GenerateComplete(
        output_ids=tokens,
        finish_reason=_FINISH_REASONS[finished.finish_reason],
        completion_tokens=len(tokens),
        index=finished.index,
    )
    match finished.WhichOneof("stop_match"):
        case "stop_token_id":
            complete.matched_token_id = finished.stop_token_id
        case "stop_string":
            complete.matched_stop_str = finished.stop_string
    return complete


def _output_logprobs(tokens: Sequence[pb.TokenLogprob]) -> vllm.OutputLogProbs | None:
    if not tokens:
        return None
    return vllm.OutputLogProbs(
        token_logprobs=[token.logprob for token in tokens],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=_top_logprobs(tokens),
    )


def _input_logprobs(tokens: Sequence[pb.TokenLogprob]) -> vllm.InputLogProbs | None:
    if not tokens:
        return None
    return vllm.InputLogProbs(
        token_logprobs=[
            vllm.InputTokenLogProb(value=token.logprob if token.HasField("logprob") else None) for token in tokens
        ],
        token_ids=[token.token_id for token in tokens],
        top_logprobs=_top_logprobs(tokens),
    )


def _top_logprobs(tokens: Sequence[pb.TokenLogprob]) -> list[vllm.TopLogProbs]:
    """Alternatives by position; none at all where only the tokens' own logprobs were requested."""
    if not any(token.top for token in tokens):
        return []
    return [
        vllm.TopLogProbs(
            values=[alternative.logprob for alternative in token.top],
            token_ids=[alternative.token_id for alternative in token.top],
        )
        for token in tokens
    ]


def embed_response(response: pb.EmbedResponse) -> vllm.EmbedResponse:
    (embedding,) = response.embeddings
    return vllm.EmbedResponse(
        embedding=embedding.values, prompt_tokens=embedding.prompt_tokens, embedding_dim=len(embedding.values)
    )
