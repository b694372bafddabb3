"""The client that awaits: the same methods as `decant.client`, on one event loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

from decant import options, results
from decant.channel import Tls, open_async
from decant.client import CANCEL_SECONDS, tokenizing, typed_errors
from decant.options import Options, Prompt
from decant.results import Answer, CancelStatus, Delta, Transcript
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceServiceStub
from runtime.errors import ServiceError


class AsyncClient:
    """A connection to a router, "host:port", for the event loop on which it is made. Close it, or use it in an
    ``async with``.

    >>> async with AsyncClient("localhost:50051") as client:
    ...     print((await client.generate("def add(a, b):", max_tokens=40)).text)
    """

    def __init__(self, address: str, *, tls: Tls | None = None, call_seconds: float = 30.0) -> None:
        """Connects when first asked; plaintext without `tls`. `call_seconds` bounds every call that writes nothing.

        Raises OSError for a TLS file that can't be read.
        """
        self._call_seconds = call_seconds
        self._channel = open_async(address, tls)
        self._stub = InferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the request's deadline: it travels to the workers
        **wanted: Unpack[Options],
    ) -> Answer:
        """The whole answer at once. `timeout` is the request's deadline in seconds; cancelling the task cancels the
        request.

        >>> answer = await client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        """
        request = options.request(prompt, wanted)
        call = self._stub.Generate(request, timeout=timeout)
        ended = False
        try:
            with typed_errors():
                message = await call
            ended = True
            return results.answer(message)
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended:
                await self._leave(request.request_id)
                call.cancel()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **wanted: Unpack[Options]) -> AsyncStream:
        """The answer as it is written. Leaving it early, or cancelling the task that reads, cancels the request.

        >>> async with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     async for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        """
        request = options.request(prompt, wanted)
        call = self._stub.GenerateStream(request, timeout=timeout)
        return AsyncStream(call, request.request_id, self._leave)

    async def cancel(self, request_id: str) -> CancelStatus:
        """Ends a request in whatever state it is. May be repeated.

        >>> await client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        return await self._cancel(request_id, self._call_seconds)

    async def tokenize(
        self, text: str | Sequence[Any], *, model: str = "", add_special_tokens: bool | None = None
    ) -> pb.TokenizeResponse:
        """Ids and texts of the tokens of a text, or of messages.

        >>> (await client.tokenize("def add")).token_ids
        [41, 310]
        """
        request = tokenizing(text, model, add_special_tokens)
        with typed_errors():
            return cast(pb.TokenizeResponse, await self._stub.Tokenize(request, timeout=self._call_seconds))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """The text of token ids.

        >>> await client.detokenize([41, 310])
        'def add'
        """
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with typed_errors():
            return cast(str, (await self._stub.Detokenize(request, timeout=self._call_seconds)).text)

    async def models(self) -> tuple[pb.Model, ...]:
        """What is served.

        >>> [model.id for model in await client.models()]
        ['tiny-python']
        """
        with typed_errors():
            return tuple((await self._stub.ListModels(pb.ListModelsRequest(), timeout=self._call_seconds)).models)

    async def model(self, name: str = "") -> pb.Model:
        """A model by its id or alias; without one the server's default. Raises NotFound.

        >>> (await client.model()).max_context_length
        2048
        """
        request = pb.GetModelRequest(model=name)
        with typed_errors():
            return cast(pb.Model, await self._stub.GetModel(request, timeout=self._call_seconds))

    async def server_info(self) -> pb.ServerInfo:
        """Which router answers, its limits, and the fields that it does not honour.

        >>> (await client.server_info()).limits.max_outputs
        1
        """
        request = pb.GetServerInfoRequest()
        with typed_errors():
            return cast(pb.ServerInfo, await self._stub.GetServerInfo(request, timeout=self._call_seconds))

    async def close(self) -> None:
        """Ends the connection, and every call that is still open on it."""
        await self._channel.close()

    async def _leave(self, request_id: str) -> None:
        """Cancels what nobody waits for any more. Closing the call does the rest, so an error here is none."""
        if request_id:
            with contextlib.suppress(ServiceError):
                await self._cancel(request_id, CANCEL_SECONDS)

    async def _cancel(self, request_id: str, seconds: float) -> CancelStatus:
        request = pb.CancelGenerationRequest(request_id=request_id)
        with typed_errors():
            return results.cancel_status(await self._stub.CancelGeneration(request, timeout=seconds))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream(Transcript):
    """An answer that is being written; see `decant.Stream`."""

    def __init__(self, call: Any, request_id: str, leave: Callable[[str], Awaitable[None]]) -> None:
        """For `AsyncClient.stream`."""
        super().__init__(request_id)
        self._call = call
        self._leave = leave
        self._over = False

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Raises the error with which the stream ended, if it did."""
        try:
            with typed_errors():
                async for message in self._call:
                    if delta := self._take(message):
                        yield delta
            self._over = True
        except ServiceError:
            self._over = True
            raise
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancels the request unless it has ended. May be repeated."""
        if not self._over:
            self._over = True
            try:
                await self._leave(self.request_id)
            finally:
                self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
