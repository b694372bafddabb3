"""The public gRPC service.

refused     only trailers: gRPC's own retries work until here
accepted    initial metadata at once, so that a proxy and the client know that the request waits here
first token messages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc
from decant.router.api.auth import AuthenticatedCall, Authenticator, authenticated
from decant.router.api.generation_calls import GenerationCalls, call_span
from decant.router.api.get_generation import generation
from decant.router.api.prompt_calls import PromptCalls
from decant.router.api.tokenizing import detokenize, tokenize
from decant.router.api.validation import UNIMPLEMENTED_FIELDS, check_known
from decant.router.execution.registry import RequestRegistry
from decant.router.limits import check_id, check_size
from decant.router.request.token_stream import Counts, TokenStream
from decant.router.text.prompt import context_length_of
from decant.router.text.served_model import ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.errors import Cancelled, InvalidArgument, NotFound
from decant.runtime.serving.server import Service
from decant.state.ids import Incarnation, RequestKey
from decant.state.owned import returns_best

_CANCELLED = pb.CancelGenerationResponse.STATUS_CANCELLED
_ALREADY_FINISHED = pb.CancelGenerationResponse.STATUS_ALREADY_FINISHED
_UNKNOWN = pb.CancelGenerationResponse.STATUS_UNKNOWN_REQUEST

_SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]

_ById = pb.ResumeStreamRequest | pb.GetGenerationRequest | pb.CancelGenerationRequest


@dataclass(frozen=True)
class ServerInfoSource:
    incarnation: Incarnation
    version: str
    limits: pb.Limits
    store_available: Callable[[], bool]
    draining: Callable[[], bool]


class InferenceService:
    """Implementation of the service; an interceptor of the server turns its errors into statuses."""

    def __init__(
        self,
        calls: GenerationCalls,
        registry: RequestRegistry,
        info: ServerInfoSource,
        authenticator: Authenticator,
        prompts: PromptCalls,
    ) -> None:
        self.authenticator = authenticator
        self._calls = calls
        self._prompts = prompts
        self._registry = registry
        self._info = info

    def service(self) -> Service:
        return Service(
            _SERVICE,
            lambda server: inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, server),
            admission_methods=frozenset({"Generate", "GenerateStream", "Score", "Embed"}),
        )

    # Generation

    @authenticated
    async def GenerateStream(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        if returns_best(request):
            raise InvalidArgument("sampling.best_of", "at most sampling.n in a stream", request.sampling.best_of)
        id, keep = request.request_id, self._calls.keepalive.keep
        with call_span("GenerateStream", id, call) as span, keep(call, id, call.write) as kept:
            stream = await self._calls.begin(request, call, span, kept)
            await self._calls.stream(stream, (), call, kept.write)

    @authenticated
    async def Generate(self, request: pb.GenerateRequest, call: AuthenticatedCall) -> pb.GenerateResponse:  # noqa: N802
        with call_span("Generate", request.request_id, call) as span:
            return await self._calls.collect(await self._calls.begin(request, call, span), call)

    @authenticated
    async def ResumeStream(self, request: pb.ResumeStreamRequest, call: AuthenticatedCall) -> None:  # noqa: N802
        key = _key_of(request, call)
        keep = self._calls.keepalive.keep
        with call_span("ResumeStream", key.id, call), keep(call, key.id, call.write, request.after_seq) as kept:
            stream = await self._registry.resume(key, call.send_acceptance)
            if returns_best(stream.request.payload):
                raise InvalidArgument("request_id", "that of a request without sampling.best_of", key.id)
            await self._calls.stream(stream, _sent_counts(request, stream), call, kept.write)

    # Accepted requests, by id

    @authenticated
    async def GetGeneration(self, request: pb.GetGenerationRequest, call: AuthenticatedCall) -> pb.Generation:  # noqa: N802
        snapshot = await self._registry.get(_key_of(request, call))
        return generation(snapshot, self._calls.model_of(snapshot.stream))

    @authenticated
    async def CancelGeneration(  # noqa: N802
        self, request: pb.CancelGenerationRequest, call: AuthenticatedCall
    ) -> pb.CancelGenerationResponse:
        try:
            end = await self._registry.cancel(_key_of(request, call))
        except NotFound:
            return pb.CancelGenerationResponse(status=_UNKNOWN)
        status = _CANCELLED if isinstance(end, Cancelled) else _ALREADY_FINISHED
        return pb.CancelGenerationResponse(status=status)

    # Prompts alone

    @authenticated
    async def Score(self, request: pb.ScoreRequest, call: AuthenticatedCall) -> pb.ScoreResponse:  # noqa: N802
        with call_span("Score", "", call) as span:
            return await self._prompts.score(request, call, span)

    @authenticated
    async def Embed(self, request: pb.EmbedRequest, call: AuthenticatedCall) -> pb.EmbedResponse:  # noqa: N802
        with call_span("Embed", "", call) as span:
            return await self._prompts.embed(request, call, span)

    # Tokenizer, models, server

    @authenticated
    async def Tokenize(self, request: pb.TokenizeRequest, call: AuthenticatedCall) -> pb.TokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._registry.hold_quota(call.tenant.name):
            return await tokenize(request, model, self._calls.context_length(model), Deadline.of(call.context))

    @authenticated
    async def Detokenize(self, request: pb.DetokenizeRequest, call: AuthenticatedCall) -> pb.DetokenizeResponse:  # noqa: N802
        check_size(request)
        check_known(request)
        model = call.tenant.models.find(request.model)
        async with self._registry.hold_quota(call.tenant.name):
            return await detokenize(request, model, self._calls.context_length(model), Deadline.of(call.context))

    @authenticated
    async def ListModels(self, request: pb.ListModelsRequest, call: AuthenticatedCall) -> pb.ListModelsResponse:  # noqa: N802
        check_known(request)
        return pb.ListModelsResponse(models=[self._model_proto(model) for model in call.tenant.models.by_id.values()])

    @authenticated
    async def GetModel(self, request: pb.GetModelRequest, call: AuthenticatedCall) -> pb.Model:  # noqa: N802
        check_known(request)
        return self._model_proto(call.tenant.models.find(request.model))

    def _model_proto(self, model: ServedModel) -> pb.Model:
        length = context_length_of(model, self._registry.max_context_length) or 0
        return pb.Model(
            id=model.id,
            max_context_length=length,
            max_output_tokens=max(0, length - 1),
            vocab_size=model.vocab_size,
            eos_token_ids=sorted(model.eos_token_ids),
            default_sampling=model.default_sampling,
            revision=model.revision,
            has_chat_template=model.has_chat_template,
            tool_call_format=model.call_format.name if model.call_format is not None else "",
            adapters=[
                pb.Adapter(name=adapter.name, revision=adapter.digest, rank=adapter.rank)
                for adapter in self._registry.adapters(model.id).values()
            ],
            reasoning_format=model.reasoning.form.name if model.reasoning is not None else "",
            quantization=self._registry.quantization(model.id),
        )

    @authenticated
    async def GetServerInfo(self, request: pb.GetServerInfoRequest, call: AuthenticatedCall) -> pb.ServerInfo:  # noqa: N802
        check_known(request)
        info = self._info
        return pb.ServerInfo(
            version=info.version,
            router_id=info.incarnation.id,
            default_model=call.tenant.models.default.id,
            limits=info.limits,
            unimplemented_fields=UNIMPLEMENTED_FIELDS,
            state_store_available=info.store_available(),
            draining=info.draining(),
        )


def _sent_counts(request: pb.ResumeStreamRequest, stream: TokenStream) -> Counts:
    """Tokens of each output that the client has. Raises InvalidArgument."""
    outputs, sent = len(stream.outputs), list(request.after_output_seqs)
    if not sent and outputs == 1:
        return [request.after_seq]
    if len(sent) > outputs:
        raise InvalidArgument("after_output_seqs", f"at most {outputs} numbers, one for each output", len(sent))
    sent += [0] * (outputs - len(sent))
    if sum(sent) != request.after_seq:
        raise InvalidArgument("after_output_seqs", f"numbers whose sum is after_seq {request.after_seq}", sum(sent))
    return sent


def _key_of(request: _ById, call: AuthenticatedCall) -> RequestKey:
    check_known(request)
    if not request.request_id:
        raise InvalidArgument("request_id", "at least 1 byte", 0)
    check_id(request.request_id)
    return RequestKey(call.tenant.name, request.request_id)
