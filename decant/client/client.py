"""The client that blocks. `decant.client.async_client` has the one that awaits.

Every method raises the typed errors of this package (`decant.ServiceError` and those below it).
"""

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
from decant.client.routers import Routers
from decant.client.streams import Stream
from decant.protos import inference_pb2 as pb
from decant.runtime.errors import ServiceError


class Client:
    """A service and its routers: "host:port" or "host", which means port 50051; several, as a sequence or with commas
    between them; or "dns:///name:port" for all that a name stands for. Threads may share one. Close it, or use it in a
    ``with``.

    Routers are asked in turn; one that drains, is not ready or not there is passed over until it is back. What may be
    asked again is, before an error is raised: where a connection broke or a router can't take the call now, as soon
    as the server said, within the deadline. A mistake of the caller's is not.

    >>> with Client("router-1:50051,router-2:50051") as client:
    ...     print(client.generate("def add(a, b):", max_tokens=40).text)
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
        """Connects when first asked; plaintext without `tls`. `token` is the secret of who asks, where the service
        wants to know: sent with every call, and shown nowhere. `call_seconds` bounds every call that writes nothing,
        `resume_seconds` how long a stream that broke is tried to be gone on with; 0: not at all.

        Raises ValueError without an address and for a token that can't be sent, OSError for a TLS file that can't be
        read.
        """
        self._call_seconds = call_seconds
        self._resume_seconds = resume_seconds
        self._routers = Routers(targets(address, tls=tls is not None), tls, token)

    @with_options
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **wanted: Unpack[Options],
    ) -> Answer:
        """The whole answer at once. `timeout` is the request's deadline in seconds.

        >>> answer = client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        ((311, 264, 489, 293), <FinishReason.STOP: 'stop'>, 5.0)
        """
        request = options.named_request(prompt, messages, wanted)
        ended = False
        try:
            message = self._routers.ask("Generate", request, timeout)
            ended = True
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended:
                self._routers.leave(request.request_id)
        return results.answer(message)

    @with_options
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **wanted: Unpack[Options],
    ) -> Stream:
        """The answer as it is written; it goes on by itself when a connection breaks. Leaving it early cancels the
        request, but for one with ``on_disconnect="detach"``.

        >>> with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     for delta in stream:
        ...         print(delta.text, end="")
        return a + b
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        (<FinishReason.STOP: 'stop'>, 4, 'd')
        """
        request = options.named_request(prompt, messages, wanted)
        return Stream(self._routers, request, RetryState(self._routers.turns, timeout, self._resume_seconds))

    def resume(self, request_id: str, after_seq: int = 0, *, timeout: float | None = None) -> Stream:
        """The rest of a request's stream, from whichever router: what comes after `after_seq` output tokens. The
        stream from which it is taken ends with Aborted (SUPERSEDED). Leaving this one cancels nothing; the request
        ends or goes on as its own ``on_disconnect`` says. Raises, when it is read, NotFound for an id that is unknown
        or forgotten.

        >>> for delta in client.resume("6f9c", after_seq=2):
        ...     print(repr(delta.text))
        ' +'
        ' b'
        """
        request = options.filled(pb.ResumeStreamRequest(), request_id=request_id, after_seq=after_seq)
        return Stream(self._routers, request, RetryState(self._routers.turns, timeout, self._resume_seconds))

    def generation(self, request_id: str) -> Generation:
        """Where a request stands, and what is written of it so far, until it is forgotten. Raises NotFound.

        >>> found = client.generation("6f9c")
        >>> found.state, found.last_seq, found.text
        (<GenerationState.DECODING: 'decoding'>, 2, 'return a')
        """
        request = options.filled(pb.GetGenerationRequest(), request_id=request_id)
        return results.generation(self._ask("GetGeneration", request))

    def cancel(self, request_id: str) -> CancelStatus:
        """Ends a request in whatever state it is. May be repeated.

        >>> client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        request = options.filled(pb.CancelGenerationRequest(), request_id=request_id)
        return results.cancel_status(self._ask("CancelGeneration", request))

    def tokenize(
        self, text: str | Sequence[Any], *, model: str = "", add_special_tokens: bool | None = None
    ) -> pb.TokenizeResponse:
        """Ids and texts of the tokens of a text, or of messages.

        >>> client.tokenize("def add").token_ids
        [41, 310]
        """
        request = options.tokenize_request(text, model, add_special_tokens)
        return cast(pb.TokenizeResponse, self._ask("Tokenize", request))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None) -> str:
        """The text of token ids.

        >>> client.detokenize([41, 310])
        'def add'
        """
        request = options.detokenize_request(token_ids, model, skip_special_tokens)
        return cast(str, self._ask("Detokenize", request).text)

    def models(self) -> tuple[pb.Model, ...]:
        """What is served.

        >>> [model.id for model in client.models()]
        ['tiny-python']
        """
        return tuple(self._ask("ListModels", pb.ListModelsRequest()).models)

    def model(self, name: str = "") -> pb.Model:
        """A model by its id or alias; without one the server's default. Raises NotFound.

        >>> client.model().max_context_length
        2048
        """
        return cast(pb.Model, self._ask("GetModel", options.filled(pb.GetModelRequest(), model=name)))

    def server_info(self) -> pb.ServerInfo:
        """Which router answers, its limits, and the fields that it does not honour.

        >>> client.server_info().limits.max_outputs
        1
        """
        return cast(pb.ServerInfo, self._ask("GetServerInfo", pb.GetServerInfoRequest()))

    def close(self) -> None:
        """Ends the connections, and every call that is still open on them; those raise Cancelled."""
        self._routers.close()

    def _ask(self, method: str, request: Message) -> Any:
        return self._routers.ask(method, request, self._call_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
