from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

from google.protobuf.message import Message

from decant.client import results
from decant.client.address import targets
from decant.client.balancer import DEFAULT_BACKOFF
from decant.client.channel import Tls
from decant.client.option_help import with_options
from decant.client.options import (
    Messages,
    Options,
    Prompt,
    detokenize_request,
    fill,
    named_request,
    tokenize_request,
)
from decant.client.prompt_requests import EmbedOptions, ScoreOptions, Text, embed_request, score_request
from decant.client.results import Answer, CancelStatus, Generation
from decant.client.routers import AsyncRouters
from decant.client.streams import AsyncStream, is_cancelled_when_left
from decant.protos import inference_pb2 as pb
from decant.runtime.backoff import Backoff
from decant.runtime.errors import ServiceError


class AsyncClient:
    """A client for the event loop on which it is made; see `decant.Client`.

    >>> async with AsyncClient("router-1:50051,router-2:50051") as client:
    ...     print((await client.generate("def add(a, b):", max_tokens=40)).text)
    return a + b
    """

    def __init__(
        self,
        address: str | Sequence[str],
        *,
        tls: Tls | None = None,
        token: str | None = None,
        call_seconds: float = 30.0,
        resume_seconds: float = 30.0,
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        self._call_seconds = call_seconds
        self._routers = AsyncRouters(targets(address, tls=tls is not None), tls, token, backoff, resume_seconds)

    @with_options
    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the request's deadline: it travels to the workers
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer. `timeout` is its deadline in seconds; cancelling the task cancels the request, except with
        ``on_disconnect="detach"``.

        >>> answer = await client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        ((311, 264, 489, 293), <FinishReason.STOP: 'stop'>, 5.0)
        """
        request = named_request(prompt, messages, options)
        ended = False
        try:
            message = await self._routers.call("Generate", request, timeout)
            ended = True
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended and is_cancelled_when_left(request):
                await self._routers.cancel_request(request.request_id)
        return results.answer(message)

    @with_options
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> AsyncStream:
        """The answer as it is generated; see `decant.Client.stream`. Cancelling the task that reads it cancels the
        request too.

        >>> async with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
        return a + b
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        (<FinishReason.STOP: 'stop'>, 4, 'd')
        """
        request = named_request(prompt, messages, options)
        return AsyncStream(self._routers, request, self._routers.retries(timeout))

    def resume(
        self,
        request_id: str,
        after_seq: int = 0,
        *,
        after_output_seqs: Sequence[int] = (),
        timeout: float | None = None,
    ) -> AsyncStream:
        """See `decant.Client.resume`.

        >>> async for delta in client.resume("6f9c", after_seq=2):
        ...     print(repr(delta.text))
        ' +'
        ' b'
        """
        request = fill(
            pb.ResumeStreamRequest(),
            request_id=request_id,
            after_seq=after_seq or sum(after_output_seqs),
            after_output_seqs=after_output_seqs,
        )
        return AsyncStream(self._routers, request, self._routers.retries(timeout))

    async def generation(self, request_id: str) -> Generation:
        """See `decant.Client.generation`.

        >>> job = await client.generation("6f9c")
        >>> job.state, job.last_seq, job.text
        (<GenerationState.DECODING: 'decoding'>, 2, 'return a')
        """
        request = fill(pb.GetGenerationRequest(), request_id=request_id)
        return results.generation(await self._call("GetGeneration", request))

    async def cancel(self, request_id: str) -> CancelStatus:
        """See `decant.Client.cancel`.

        >>> await client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        request = fill(pb.CancelGenerationRequest(), request_id=request_id)
        return results.cancel_status(await self._call("CancelGeneration", request))

    async def score(
        self,
        prompt: Text,
        continuations: Iterable[Text],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the call's deadline: it travels to the workers
        **options: Unpack[ScoreOptions],
    ) -> pb.ScoreResponse:
        """See `decant.Client.score`.

        >>> response = await client.score("2 + 2 =", [" 4", " 5"])
        >>> [score.logprob for score in response.scores]
        [-0.5, -3.0]
        >>> [(token.token, token.logprob, token.rank) for token in response.scores[0].tokens]
        [(' 4', -0.5, 1)]
        """
        request = score_request(prompt, continuations, options)
        return cast(pb.ScoreResponse, await self._routers.call("Score", request, timeout))

    async def embed(
        self,
        inputs: str | Iterable[Text],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the call's deadline: it travels to the workers
        **options: Unpack[EmbedOptions],
    ) -> pb.EmbedResponse:
        """See `decant.Client.embed`.

        >>> response = await client.embed(["def add", "import os"], pooling="mean")
        >>> [list(embedding.values) for embedding in response.embeddings]
        [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]
        """
        request = embed_request(inputs, options)
        return cast(pb.EmbedResponse, await self._routers.call("Embed", request, timeout))

    async def tokenize(
        self,
        text: str | Sequence[Any],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
    ) -> pb.TokenizeResponse:
        """See `decant.Client.tokenize`.

        >>> (await client.tokenize("def add")).token_ids
        [41, 310]
        """
        request = tokenize_request(
            text, model, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )
        return cast(pb.TokenizeResponse, await self._call("Tokenize", request))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """The text of the tokens.

        >>> await client.detokenize([41, 310])
        'def add'
        """
        request = detokenize_request(token_ids, model, skip_special_tokens)
        return cast(str, (await self._call("Detokenize", request)).text)

    async def models(self) -> tuple[pb.Model, ...]:
        """The served models.

        >>> [model.id for model in await client.models()]
        ['tiny-python']
        """
        return tuple((await self._call("ListModels", pb.ListModelsRequest())).models)

    async def model(self, name: str = "") -> pb.Model:
        """See `decant.Client.model`.

        >>> (await client.model()).max_context_length
        2048
        """
        return cast(pb.Model, await self._call("GetModel", fill(pb.GetModelRequest(), model=name)))

    async def server_info(self) -> pb.ServerInfo:
        """See `decant.Client.server_info`.

        >>> (await client.server_info()).limits.max_outputs
        1
        """
        return cast(pb.ServerInfo, await self._call("GetServerInfo", pb.GetServerInfoRequest()))

    def with_token(self, token: str | None) -> Self:
        """See `decant.Client.with_token`.

        >>> (await client.with_token("SECRET").server_info()).limits.max_outputs
        1
        """
        other = copy.copy(self)
        other._routers = self._routers.with_token(token)
        return other

    async def close(self) -> None:
        """Close the connections; open calls raise Cancelled."""
        await self._routers.close()

    async def _call(self, method: str, request: Message) -> Any:
        return await self._routers.call(method, request, self._call_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
