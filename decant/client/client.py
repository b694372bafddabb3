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
from decant.client.routers import Routers
from decant.client.streams import Stream, is_cancelled_when_left
from decant.protos import inference_pb2 as pb
from decant.runtime.backoff import Backoff
from decant.runtime.errors import ServiceError


class Client:
    """A client of routers: "host:port", or "host" for port 50051; several as a sequence or separated by commas; or
    "dns:///name:port" for all addresses of a name. Threads may share it. Close it, or use ``with``.

    Routers are called in turn; one that drains, is not ready or can't be reached is skipped until it is back. Within
    the deadline, a call is repeated if a connection broke or a router can't take it now. Calls raise
    `decant.ServiceError`, at once for errors of the caller.

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
        backoff: Backoff = DEFAULT_BACKOFF,
    ) -> None:
        """Make a client, which connects with the first call; plaintext without `tls`.

        token           secret of this tenant
        call_seconds    deadline of calls that do not generate
        resume_seconds  time to resume a broken stream; 0: no resumption
        backoff         time for which a failed router is skipped

        Raises ValueError without an address or for a token that can't be sent, OSError for an unreadable TLS file.
        """
        self._call_seconds = call_seconds
        self._routers = Routers(targets(address, tls=tls is not None), tls, token, backoff, resume_seconds)

    @with_options
    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Answer:
        """The whole answer. `timeout` is its deadline in seconds.

        >>> answer = client.generate([5, 17, 9], temperature=0, max_tokens=16, token_ids=True)
        >>> answer.token_ids, answer.finished.reason, answer.receipt.ttft_ms
        ((311, 264, 489, 293), <FinishReason.STOP: 'stop'>, 5.0)
        """
        request = named_request(prompt, messages, options)
        ended = False
        try:
            message = self._routers.call("Generate", request, timeout)
            ended = True
        except ServiceError:
            ended = True
            raise
        finally:
            if not ended and is_cancelled_when_left(request):
                self._routers.cancel_request(request.request_id)
        return results.answer(message)

    @with_options
    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        timeout: float | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """The answer as it is generated; resumes when a connection breaks. Leaving it early cancels the request, except
        with ``on_disconnect="detach"``.

        >>> with client.stream("def add(a, b):", temperature=0.7, seed=1) as stream:
        ...     for delta in stream:
        ...         print(delta.text, end="")
        return a + b
        >>> stream.finished.reason, stream.usage.completion_tokens, stream.receipt.decode_worker
        (<FinishReason.STOP: 'stop'>, 4, 'd')
        """
        request = named_request(prompt, messages, options)
        return Stream(self._routers, request, self._routers.retries(timeout))

    def resume(
        self,
        request_id: str,
        after_seq: int = 0,
        *,
        after_output_seqs: Sequence[int] = (),
        timeout: float | None = None,
    ) -> Stream:
        """The rest of a request's stream, from any router: all after `after_seq` output tokens. An older stream of it
        ends with Aborted (SUPERSEDED). Leaving this one cancels nothing: the request's ``on_disconnect`` decides.
        Reading raises NotFound for an id that is unknown or has expired. A request with several outputs resumes after
        `after_output_seqs`, the `output_seqs` of the stream that was lost.

        >>> for delta in client.resume("6f9c", after_seq=2):
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
        return Stream(self._routers, request, self._routers.retries(timeout))

    def generation(self, request_id: str) -> Generation:
        """State and output so far, until the request expires. Raises NotFound.

        >>> job = client.generation("6f9c")
        >>> job.state, job.last_seq, job.text
        (<GenerationState.DECODING: 'decoding'>, 2, 'return a')
        """
        request = fill(pb.GetGenerationRequest(), request_id=request_id)
        return results.generation(self._call("GetGeneration", request))

    def cancel(self, request_id: str) -> CancelStatus:
        """Cancel a request in any state; idempotent.

        >>> client.cancel("6f9c")
        <CancelStatus.CANCELLED: 'cancelled'>
        """
        request = fill(pb.CancelGenerationRequest(), request_id=request_id)
        return results.cancel_status(self._call("CancelGeneration", request))

    def score(
        self,
        prompt: Text,
        continuations: Iterable[Text],
        *,
        timeout: float | None = None,
        **options: Unpack[ScoreOptions],
    ) -> pb.ScoreResponse:
        """Log-probability of each continuation after the prompt, which is computed once. Texts, or token ids.
        `logprobs` is the number of alternatives for each token. `timeout` is the call's deadline in seconds.

        >>> response = client.score("2 + 2 =", [" 4", " 5"])
        >>> [score.logprob for score in response.scores]
        [-0.5, -3.0]
        >>> [(token.token, token.logprob, token.rank) for token in response.scores[0].tokens]
        [(' 4', -0.5, 1)]
        """
        request = score_request(prompt, continuations, options)
        return cast(pb.ScoreResponse, self._routers.call("Score", request, timeout))

    def embed(
        self,
        inputs: str | Iterable[Text],
        *,
        timeout: float | None = None,
        **options: Unpack[EmbedOptions],
    ) -> pb.EmbedResponse:
        """Embeddings of a text or of several; an input may also be token ids. `pooling` is "last", the default,
        or "mean". `timeout` is the call's deadline in seconds.

        >>> response = client.embed(["def add", "import os"], pooling="mean")
        >>> [list(embedding.values) for embedding in response.embeddings]
        [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, -0.5]]
        """
        request = embed_request(inputs, options)
        return cast(pb.EmbedResponse, self._routers.call("Embed", request, timeout))

    def tokenize(
        self,
        text: str | Sequence[Any],
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        parse_special_tokens: bool | None = None,
    ) -> pb.TokenizeResponse:
        """The tokens of a text or of messages.

        >>> client.tokenize("def add").token_ids
        [41, 310]
        """
        request = tokenize_request(
            text, model, add_special_tokens=add_special_tokens, parse_special_tokens=parse_special_tokens
        )
        return cast(pb.TokenizeResponse, self._call("Tokenize", request))

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None) -> str:
        """The text of the tokens.

        >>> client.detokenize([41, 310])
        'def add'
        """
        request = detokenize_request(token_ids, model, skip_special_tokens)
        return cast(str, self._call("Detokenize", request).text)

    def models(self) -> tuple[pb.Model, ...]:
        """The served models.

        >>> [model.id for model in client.models()]
        ['tiny-python']
        """
        return tuple(self._call("ListModels", pb.ListModelsRequest()).models)

    def model(self, name: str = "") -> pb.Model:
        """The model of this id; without one, the server's default. Raises NotFound.

        >>> client.model().max_context_length
        2048
        """
        return cast(pb.Model, self._call("GetModel", fill(pb.GetModelRequest(), model=name)))

    def server_info(self) -> pb.ServerInfo:
        """Id, version, limits and unsupported fields of the router that answers.

        >>> client.server_info().limits.max_outputs
        1
        """
        return cast(pb.ServerInfo, self._call("GetServerInfo", pb.GetServerInfoRequest()))

    def with_token(self, token: str | None) -> Self:
        """A client of another tenant over the same connections, which are closed with either. Raises ValueError for a
        token that can't be sent.

        >>> client.with_token("SECRET").server_info().limits.max_outputs
        1
        """
        other = copy.copy(self)
        other._routers = self._routers.with_token(token)
        return other

    def close(self) -> None:
        """Close the connections; open calls raise Cancelled."""
        self._routers.close()

    def _call(self, method: str, request: Message) -> Any:
        return self._routers.call(method, request, self._call_seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
