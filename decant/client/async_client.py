"""The client that awaits: the same methods as `decant.client.client`, on one event loop."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

from google.protobuf.message import Message

from decant.client import options, results
from decant.client.address import targets
from decant.client.channel import Tls
from decant.client.option_help import with_options
from decant.client.options import Messages, Options, Prompt
from decant.client.results import Answer, CancelStatus, Generation
from decant.client.retry import RetryState
from decant.client.routers import AsyncRouters
from decant.client.streams import AsyncStream
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import ServiceError


class AsyncClient:
    """A service and its routers, for the event loop on which it is made; `decant.Client` says how they are named and
    asked. Close it, or use it in an ``async with``.

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
    ) -> None:
        """As `decant.Client`."""
        self._call_seconds = call_seconds
        self._resume_seconds = resume_seconds
        self._routers = AsyncRouters(targets(address, tls=tls is not None), tls, token)

    @with_options
    async def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the request's deadline: it travels to the workers
        **wanted: Unpack[Options],
    ) -> Answer:
        """The whole answer at once. `timeout` is the request's deadline in seconds; cancelling the task cancels the
        request.

        >>> answer = await client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        ((311, 264, 489, 293), <FinishReason.STOP: 'stop'>, 5.0)
        """
        request = options.named_request(prompt, messages, wanted)
        ended = False
        try:
            message = await self._routers.ask("Generate", request, timeout)
            ended = True
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended:
                await self._routers.leave(request.request_id)
        return results.answer(message)

    @with_options
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **wanted: Unpack[Options],
    ) -> AsyncStream:
        """The answer as it is written; it goes on by itself when a connection breaks. Leaving it early, or cancelling
        the task that reads, cancels the request, but for one with ``on_disconnect="detach"``.

        >>> async with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
        return a + b
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        (<FinishReason.STOP: 'stop'>, 4, 'd')
        """
        request = options.named_request(prompt, messages, wanted)
        return AsyncStream(self._routers, request, RetryState(self._routers.turns, timeout, self._resume_seconds))

    def resume(self, request_id: str, after_seq: int = 0, *, timeout: float | None = None) -> AsyncStream:
        """The rest of a request's stream, from whichever router; see `decant.Client.resume`.

        >>> async for delta in client.resume("6f9c", after_seq=2):
        ...     print(repr(delta.text))
        ' +'
        ' b'
        """
        request = options.filled(pb.ResumeStreamRequest(), request_id=request_id, after_seq=after_seq)
        return AsyncStream(self._routers, request, RetryState(self._routers.turns, timeout, self._resume_seconds))

    async def generation(self, request_id: str) -> Generation:
        """Where a request stands, and what is written of it so far, until it is forgotten. Raises NotFound.

        >>> found = await client.generation("6f9c")
        >>> found.state, found.last_seq, found.text
        (<GenerationState.DECODING: 'decoding'>, 2, 'return a')
        """
        request = options.filled(pb.GetGenerationRequest(), request_id=request_id)
        return results.generation(await self._ask("GetGeneration", request))

    async def cancel(self, request_id: str) -> CancelStatus:
        """Ends a request in whatever state it is. May be repeated.

        >>> await client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        request = options.filled(pb.CancelGenerationRequest(), request_id=request_id)
        return results.cancel_status(await self._ask("CancelGeneration", request))

    async def tokenize(
        self, text: str | Sequence[Any], *, model: str = "", add_special_tokens: bool | None = None
    ) -> pb.TokenizeResponse:
        """Ids and texts of the tokens of a text, or of messages.

        >>> (await client.tokenize("def add")).token_ids
        [41, 310]
        """
        request = options.tokenize_request(text, model, add_special_tokens)
        return cast(pb.TokenizeResponse, await self._ask("Tokenize", request))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids.

        >>> await client.detokenize([41, 310])
        'def add'
        """
        request = options.detokenize_request(token_ids, model, skip_special_tokens)
        return cast(str, (await self._ask("Detokenize", request)).text)

    async def models(self) -> tuple[pb.Model, ...]:
        """What is served.

        >>> [model.id for model in await client.models()]
        ['tiny-python']
        """
        return tuple((await self._ask("ListModels", pb.ListModelsRequest())).models)

    async def model(self, name: str = "") -> pb.Model:
        """A model by its id or alias; without one the server's default. Raises NotFound.

        >>> (await client.model()).max_context_length
        2048
        """
        return cast(pb.Model, await self._ask("GetModel", options.filled(pb.GetModelRequest(), model=name)))

    async def server_info(self) -> pb.ServerInfo:
        """Which router answers, its limits, and the fields that it does not honour.

        >>> (await client.server_info()).limits.max_outputs
        1
        """
        return cast(pb.ServerInfo, await self._ask("GetServerInfo", pb.GetServerInfoRequest()))

    async def close(self) -> None:
        """Ends the connections, and every call that is still open on them; those raise Cancelled."""
        await self._routers.close()

    async def _ask(self, method: str, request: Message) -> Any:
        return await self._routers.ask(method, request, self._call_seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
