"""State that one request keeps from one attempt to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from decant.protos import worker_pb2 as wire
from decant.router.placement.prefix_index import PromptBlocks
from decant.router.request.finish import finish_from_tokens
from decant.router.request.output import Output
from decant.router.request.stored import new_record, recorded_decode_worker, recorded_layout_hash, stream_from_store
from decant.router.request.token_stream import TokenStream
from decant.router.request.valid_request import ValidRequest
from decant.router.workers.needs import Needs, needs_of
from decant.router.workers.pool import WorkerPool
from decant.router.workers.worker_handle import WorkerHandle
from decant.runtime.connections.channel import whole_ms
from decant.runtime.packed import pack
from decant.state.ids import Incarnation
from decant.state.owned import OwnedRequest, StoredRequest


@dataclass(slots=True)
class AttemptContext:
    """What the attempts of one request share: its stream, its record, and what earlier attempts have shown.

    The execution owns it and changes it between attempts; attempts read it for placement and for messages to workers.
    """

    stream: TokenStream
    owned: OwnedRequest
    excluded_workers: set[Incarnation] = field(default_factory=set)
    lacking_adapter: set[Incarnation] = field(default_factory=set)
    """Workers that have refused the request because they do not have its adapter."""
    local_prefill: bool = False
    """Use no prefill worker."""
    current_decode_worker: Incarnation | None = None
    layout_hash: int = 0
    """Layout hash of the workers whose tokens an earlier owner has sent, if they give equal bits; else 0."""
    traceparent: str = ""
    prefix: PromptBlocks = field(init=False)
    needs: Needs = field(init=False)

    def __post_init__(self) -> None:
        self.needs = needs_of(self.stream.request.engine_request)
        self.prefix = PromptBlocks(self.stream.request.engine_request)

    @property
    def model(self) -> str:
        return self.stream.request.engine_request.model

    @property
    def adapter_name(self) -> str:
        return self.stream.request.payload.lora_name

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the outputs so far."""
        return self.stream.request.prompt_tokens + self.stream.num_tokens

    @property
    def unfinished(self) -> list[Output]:
        return [output for output in self.stream.outputs if output.finish is None]

    @property
    def needs_decode(self) -> bool:
        """Whether an output may get more than one more token."""
        return any(output.end_limit - output.position > 1 for output in self.unfinished)

    def output_prefixes(self) -> list[wire.OutputPrefix]:
        """Prefixes of the unfinished outputs, for an attempt that continues them.

        An output whose tokens are all there, while the prompt's log-probabilities are not, gets its last token again.
        """
        request, prefixes = self.stream.request, list[wire.OutputPrefix]()
        for output in self.unfinished:
            is_complete = finish_from_tokens(request, output.tokens) is not None
            tokens = output.tokens[:-1] if is_complete else output.tokens
            prefixes.append(wire.OutputPrefix(output=output.index, tokens=pack(tokens)))
        return prefixes

    @property
    def run_id(self) -> wire.Run:
        """Address of the current attempt at its workers."""
        owned = self.owned
        return wire.Run(request=str(owned.key), epoch=owned.epoch, attempt=owned.attempt, digest=owned.digest)

    def engine_request(self, outputs: Iterable[wire.OutputPrefix]) -> wire.EngineRequest:
        request = self.stream.request
        message = wire.EngineRequest()
        message.CopyFrom(request.engine_request)
        message.traceparent = self.traceparent
        message.age_ms = whole_ms(asyncio.get_running_loop().time() - request.accepted_at)
        remaining_ms = request.deadline.remaining_ms()
        if remaining_ms is not None:
            message.remaining_ms = remaining_ms
        del message.outputs[:]
        message.outputs.extend(outputs)
        return message

    def mark_uncertain_tail(self, worker: WorkerHandle) -> None:
        """Mark the tail uncertain if a client may have tokens that this worker would generate differently."""
        registration = worker.registration
        if self.stream.tail.may_lag_client and not (
            registration.equal_bits and registration.layout_hash == self.layout_hash
        ):
            certain, record = self.stream.mark_tail_uncertain(), self.owned.record
            record.certain_seq = sum(certain)
            record.certain_output_seqs[:] = certain if len(certain) > 1 else []

    def record_attempt(self, failure: wire.Failure | None = None) -> None:
        """Record the workers of the attempt, and why it failed."""
        attempts, trace = self.owned.record.attempts, self.stream.trace
        if not attempts or attempts[-1].attempt != self.owned.attempt:
            attempts.add(attempt=self.owned.attempt)
        attempt = attempts[-1]
        if trace.prefill is not None:
            attempt.prefill_worker.CopyFrom(trace.prefill.peer)
        if trace.decode is not None:
            attempt.decode_worker.CopyFrom(trace.decode.peer)
        for worker in (trace.prefill, trace.decode):  # their layout hashes agree
            if worker is not None:
                attempt.layout_hash = worker.layout_hash if worker.equal_bits else 0
        if failure is not None:
            attempt.failure.CopyFrom(failure)


def new_context(request: ValidRequest, router: wire.Peer, epoch: int) -> AttemptContext:
    stream = TokenStream(request)
    stream.begin_writing()
    return AttemptContext(stream, new_record(request, Incarnation.of(router), epoch))


def adopted_context(request: ValidRequest, stored: StoredRequest, pool: WorkerPool) -> AttemptContext:
    stream = stream_from_store(stored, request)
    context = AttemptContext(stream, OwnedRequest.from_stored(stored))
    if context.owned.has_prompt_logprobs:
        context.current_decode_worker = recorded_decode_worker(stored)
    context.local_prefill = bool(stored.entries)
    context.layout_hash = recorded_layout_hash(stored, pool)
    return context
