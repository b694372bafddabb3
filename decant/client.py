"""The client that blocks. `decant.aio` has the one that awaits.

Every method raises the typed errors of this package (`decant.ServiceError` and those below it).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc

from decant import options, results
from decant.channel import Tls, open_blocking
from decant.options import Options, Prompt
from decant.results import Answer, CancelStatus, Delta, Transcript
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import InferenceServiceStub
from runtime.errors import EndedCall, ServiceError, from_call

CANCEL_SECONDS = 2.0
"""For the cancel of a request that is being left: a router that is gone must not hold up its client."""


@contextlib.contextmanager
def typed_errors() -> Iterator[None]:
    """gRPC's error of a call becomes the service's own."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_call(cast(EndedCall, error)) from None


class Client:
    """A connection to a router, "host:port". Threads may share one. Close it, or use it in a ``with``.

    >>> with Client("localhost:50051") as client:
    ...     print(client.generate("def add(a, b):", max_tokens=40).text)
    """

    def __init__(self, address: str, *, tls: Tls | None = None, call_seconds: float = 30.0) -> None:
        """Connects when first asked; plaintext without `tls`. `call_seconds` bounds every call that writes nothing.

        Raises OSError for a TLS file that can't be read.
        """
        self._call_seconds = call_seconds
        self._channel = open_blocking(address, tls)
        self._stub = InferenceServiceStub(self._channel)

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **wanted: Unpack[Options]) -> Answer:
        """The whole answer at once. `timeout` is the request's deadline in seconds.

        >>> answer = client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        """
        request = options.request(prompt, wanted)
        call = self._stub.Generate.future(request, timeout=timeout)
        try:
            with typed_errors():
                return results.answer(call.result())
        finally:
            if not call.done():
                self._leave(request.request_id)
                call.cancel()

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **wanted: Unpack[Options]) -> Stream:
        """The answer as it is written. Leaving it early cancels the request.

        >>> with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     for delta in stream:
        ...         print(delta.text, end="")
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        """
        request = options.request(prompt, wanted)
        call = self._stub.GenerateStream(request, timeout=timeout)
        return Stream(call, request.request_id, self._leave)

    def cancel(self, request_id: str) -> CancelStatus:
        """Ends a request in whatever state it is. May be repeated.

        >>> client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        return self._cancel(request_id, self._call_seconds)

    def tokenize(
        self, text: str | Sequence[Any], *, model: str = "", add_special_tokens: bool | None = None
    ) -> pb.TokenizeResponse:
        """Ids and texts of the tokens of a text, or of messages.

        >>> client.tokenize("def add").token_ids
        [41, 310]
        """
        request = tokenizing(text, model, add_special_tokens)
        with typed_errors():
            return cast(pb.TokenizeResponse, self._stub.Tokenize(request, timeout=self._call_seconds))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None) -> str:
        """The text of token ids.

        >>> client.detokenize([41, 310])
        'def add'
        """
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        with typed_errors():
            return cast(str, self._stub.Detokenize(request, timeout=self._call_seconds).text)

    def models(self) -> tuple[pb.Model, ...]:
        """What is served.

        >>> [model.id for model in client.models()]
        ['tiny-python']
        """
        with typed_errors():
            return tuple(self._stub.ListModels(pb.ListModelsRequest(), timeout=self._call_seconds).models)

    def model(self, name: str = "") -> pb.Model:
        """A model by its id or alias; without one the server's default. Raises NotFound.

        >>> client.model().max_context_length
        2048
        """
        request = pb.GetModelRequest(model=name)
        with typed_errors():
            return cast(pb.Model, self._stub.GetModel(request, timeout=self._call_seconds))

    def server_info(self) -> pb.ServerInfo:
        """Which router answers, its limits, and the fields that it does not honour.

        >>> client.server_info().limits.max_outputs
        1
        """
        request = pb.GetServerInfoRequest()
        with typed_errors():
            return cast(pb.ServerInfo, self._stub.GetServerInfo(request, timeout=self._call_seconds))

    def close(self) -> None:
        """Ends the connection, and every call that is still open on it."""
        self._channel.close()

    def _leave(self, request_id: str) -> None:
        """Cancels what nobody waits for any more. Closing the call does the rest, so an error here is none."""
        if request_id:
            with contextlib.suppress(ServiceError):
                self._cancel(request_id, CANCEL_SECONDS)

    def _cancel(self, request_id: str, seconds: float) -> CancelStatus:
        request = pb.CancelGenerationRequest(request_id=request_id)
        with typed_errors():
            return results.cancel_status(self._stub.CancelGeneration(request, timeout=seconds))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream(Transcript):
    """An answer that is being written; iterating gives its deltas. What has arrived so far stays readable: `text`,
    `outputs`, and after the end `finished`, `usage` and `receipt`.

    Whoever leaves it early (a break, an exception, the end of a ``with``) cancels the request.
    """

    def __init__(self, call: Any, request_id: str, leave: Callable[[str], None]) -> None:
        """For `Client.stream`."""
        super().__init__(request_id)
        self._call = call
        self._leave = leave
        self._over = False

    def __iter__(self) -> Iterator[Delta]:
        """Raises the error with which the stream ended, if it did."""
        try:
            with typed_errors():
                for message in self._call:
                    if delta := self._take(message):
                        yield delta
            self._over = True
        except ServiceError:
            self._over = True
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancels the request unless it has ended. May be repeated."""
        if not self._over:
            self._over = True
            self._leave(self.request_id)
            self._call.cancel()

    def break_off(self) -> None:
        """Ends the call and tells nobody: iterating raises Cancelled. From any thread, and from a signal handler."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def tokenizing(text: str | Sequence[Any], model: str, add_special_tokens: bool | None) -> pb.TokenizeRequest:
    """Raises InvalidArgument."""
    request = pb.TokenizeRequest(model=model, add_special_tokens=add_special_tokens, return_tokens=True)
    if isinstance(text, str):
        request.text = text
    else:
        options.put_messages(request.messages, text)
    return request
