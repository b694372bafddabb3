"""Calls that compute prompts alone: `Score` and `Embed`, in each protocol."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from decant.protos import inference_pb2 as pb
from decant.protos import worker_pb2 as wire
from decant.router.admission.request_size import RequestSize
from decant.router.api.adapter_names import AdapterNames
from decant.router.api.auth import AuthenticatedCall
from decant.router.api.prompt_requests import (
    EngineTarget,
    check_embed,
    check_score,
    embed_prompts,
    embed_requests,
    score_prompts,
    score_requests,
)
from decant.router.api.response_writer import token_logprob
from decant.router.api.validation import check_known
from decant.router.execution.registry import RequestRegistry
from decant.router.limits import check_size
from decant.router.prompt_runs.prompt_run import ComputedPrompt
from decant.router.prompt_runs.runner import PromptBatch, PromptRunner
from decant.router.text.prompt import context_length_of
from decant.router.text.served_model import ServedModel
from decant.runtime.connections.channel import Deadline
from decant.runtime.error_details import Reason, shorten
from decant.runtime.errors import RETRY_AFTER_SECONDS, ServiceError, Unavailable
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.metrics import REFUSALS, PromptSource, RequestMetrics
from decant.runtime.telemetry.tracing import Span
from decant.state.ids import RequestKey

LEFT = "left"
DONE = "ok"

_log = logs.get(__name__)


@dataclass(slots=True)
class _Meter:
    method: str
    model: ServedModel
    tenant: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompts: int = 0


class PromptCalls:
    """Validates the calls, has their prompts computed, and makes the responses; counts how each ended."""

    def __init__(self, registry: RequestRegistry, runner: PromptRunner, metrics: RequestMetrics) -> None:
        self._registry = registry
        self._adapters = AdapterNames(registry)
        self._runner = runner
        self._metrics = metrics

    async def score(self, request: pb.ScoreRequest, call: AuthenticatedCall, span: Span) -> pb.ScoreResponse:
        """Raises what `PromptRunner.run` does, NotFound and PermissionDenied."""
        check_size(request)
        check_known(request)
        model, lora_name = self._model(request, call)
        async with self._counted("Score", model, call) as meter:
            check_score(request)
            texts = [request.prompt, *(item.text for item in request.continuations)]
            ids = [request.token_ids.ids, *(item.token_ids.ids for item in request.continuations)]
            length = await self._begin(model, call, texts, ids, request.priority)
            adapter = self._adapters.digest(lora_name, model.id)
            deadline, tenant = Deadline.of(call.context), call.tenant.name
            prompt, wholes = await score_prompts(request, model, length, deadline)
            tokens = len(prompt) + sum(len(whole) - len(prompt) for whole in wholes)
            requests = score_requests(request, EngineTarget(model, adapter, tenant), prompt, wholes)
            batch = PromptBatch(
                tenant, requests, tokens, request.priority, deadline, shares_first=True, adapter_name=lora_name
            )
            computed = await self._run(batch, meter, call, span)
            meter.cached_tokens = min(computed[0].cached_tokens, len(prompt))
            scores = [
                _score(model, whole[len(prompt) :], each.logprobs) for whole, each in zip(wholes, computed, strict=True)
            ]
            return pb.ScoreResponse(model=model.id, scores=scores, usage=_usage(meter))

    async def embed(self, request: pb.EmbedRequest, call: AuthenticatedCall, span: Span) -> pb.EmbedResponse:
        """Raises what `PromptRunner.run` does, NotFound and PermissionDenied."""
        check_size(request)
        check_known(request)
        model, lora_name = self._model(request, call)
        async with self._counted("Embed", model, call) as meter:
            check_embed(request)
            texts = [item.text for item in request.inputs]
            ids = [item.token_ids.ids for item in request.inputs]
            length = await self._begin(model, call, texts, ids, request.priority)
            adapter = self._adapters.digest(lora_name, model.id)
            deadline, tenant = Deadline.of(call.context), call.tenant.name
            prompts = await embed_prompts(request, model, length, deadline)
            requests = embed_requests(request, EngineTarget(model, adapter, tenant), prompts)
            tokens = sum(map(len, prompts))
            batch = PromptBatch(tenant, requests, tokens, request.priority, deadline, adapter_name=lora_name)
            computed = await self._run(batch, meter, call, span)
            meter.cached_tokens = sum(each.cached_tokens for each in computed)
            embeddings = [
                pb.Embedding(values=array("f", each.embedding), prompt_tokens=len(prompt))
                for prompt, each in zip(prompts, computed, strict=True)
            ]
            return pb.EmbedResponse(model=model.id, embeddings=embeddings, usage=_usage(meter))

    def _model(self, request: pb.ScoreRequest | pb.EmbedRequest, call: AuthenticatedCall) -> tuple[ServedModel, str]:
        """Return the model and the name of its adapter, which is empty for none. Raises NotFound, PermissionDenied."""
        models = call.tenant.models
        name, adapter = self._adapters.base_and_adapter(request.model, request.lora_name, models)
        return models.find(name), adapter

    async def _begin(
        self,
        model: ServedModel,
        call: AuthenticatedCall,
        texts: Sequence[str],
        ids: Sequence[Sequence[int]],
        priority: int,
    ) -> int:
        """Wait for a first worker and check the load; return the context length."""
        least = sum(map(len, ids)) + sum(model.least_tokens_at_once(text) for text in texts if text)
        key, deadline = RequestKey(call.tenant.name, ""), Deadline.of(call.context)
        await self._registry.wait_for_worker(key, model.id, least, deadline, call.send_acceptance)
        self._registry.check_open(model.id)
        await self._registry.check_load(key, model.id, RequestSize(least, max_tokens=1), priority, deadline)
        length = context_length_of(model, self._registry.max_context_length)
        if length is None:
            raise Unavailable(Reason.NO_WORKER, "no worker serves this model", retry_after=RETRY_AFTER_SECONDS)
        return length

    async def _run(
        self, batch: PromptBatch, meter: _Meter, call: AuthenticatedCall, span: Span
    ) -> list[ComputedPrompt]:
        meter.prompt_tokens, meter.prompts = batch.tokens, len(batch.requests)
        span.set(model=batch.model, tenant=batch.tenant, prompts=meter.prompts, prompt_tokens=batch.tokens)
        for request in batch.requests:
            request.traceparent = span.traceparent
        return await self._runner.run(batch, call.send_acceptance)

    @asynccontextmanager
    async def _counted(self, method: str, model: ServedModel, call: AuthenticatedCall) -> AsyncIterator[_Meter]:
        clock = asyncio.get_running_loop().time
        meter, begin, outcome = _Meter(method, model, call.tenant.name), clock(), LEFT
        try:
            yield meter
            outcome = DONE
        except ServiceError as error:
            outcome = error.label
            if error.reason in REFUSALS:
                self._metrics.tenants.count_refusal(meter.tenant)
            raise
        finally:
            self._close(meter, outcome, clock() - begin)

    def _close(self, meter: _Meter, outcome: str, seconds: float) -> None:
        metrics, model = self._metrics, meter.model.id
        metrics.prompt_calls.labels(model, meter.method, outcome).inc()
        metrics.prompt_call_seconds.labels(model, meter.method).observe(seconds)
        if outcome == DONE:
            computed = meter.prompt_tokens - meter.cached_tokens
            metrics.prompt.labels(model, PromptSource.CACHED.value).inc(meter.cached_tokens)
            metrics.prompt.labels(model, PromptSource.COMPUTED.value).inc(max(0, computed))
            metrics.tenants.count_request(meter.tenant, meter.prompt_tokens)
        _log.info(
            "prompt call ended",
            method=meter.method,
            tenant=shorten(meter.tenant),
            model=model,
            outcome=outcome,
            prompts=meter.prompts,
            prompt_tokens=meter.prompt_tokens,
            cached_tokens=meter.cached_tokens,
            seconds=round(seconds, 3),
        )


def _score(model: ServedModel, tokens: Sequence[int], logprobs: Sequence[wire.TokenLogprobs]) -> pb.Score:
    entries = [token_logprob(model.token_table, token, each) for token, each in zip(tokens, logprobs, strict=True)]
    return pb.Score(logprob=math.fsum(entry.logprob for entry in entries), tokens=entries)


def _usage(meter: _Meter) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=meter.prompt_tokens,
        total_tokens=meter.prompt_tokens,
        cached_prompt_tokens=min(meter.cached_tokens, meter.prompt_tokens),
    )
