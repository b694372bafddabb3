"""The engine's step: schedule, run, commit, publish. Not thread-safe; ``loop`` provides the thread.

add ──> waiting ──> running ──> ended           cancel: allowed in any state
           ^           │  │
           └─ preempt ─┘  └──> parked ──> release (or resume: running again)
reserve ──> arrival ──> join: running           (``exports``)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from decant.engine import inspection
from decant.engine.block_hashes import hash_blocks, root_hash
from decant.engine.blocks import BlockPool
from decant.engine.costs import StepTimePredictor
from decant.engine.errors import InvalidConfig, InvalidRequest, UnknownSequence
from decant.engine.exports import KvTransfers
from decant.engine.forced_tokens import MAX_FORCED, ROWS_PER_SECOND, append_forced
from decant.engine.forks import check_group, link
from decant.engine.kv_layout import longest_sequence
from decant.engine.output import (
    Load,
    PromptEmbedding,
    PromptLogprobs,
    SequenceFinished,
    SequenceStarted,
    StepOutput,
    Token,
)
from decant.engine.plan import Device, FurtherToken, PreparedAdapter, StepResult, TokenLogprobs
from decant.engine.request import FinishReason, Request, check_embedding, check_request
from decant.engine.scheduler import Limits, Scheduler, priority_key
from decant.engine.sequence import Sequence as EngineSequence
from decant.engine.step_queue import LaunchedStep, StepQueue
from decant.engine.transfer import Checksum, default_checksum


class Engine:
    """Computes tokens for sequences, a step at a time.

    It owns the sequences, the block pool, the scheduler and the transfers, and calls the device once a step.
    ``EngineLoop`` calls it on its own thread; tests and benchmarks call it directly.
    """

    def __init__(
        self,
        device: Device,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        checksum: Checksum = default_checksum,
    ) -> None:
        limits = limits or Limits(context_length=device.context_length)
        self.pool = BlockPool(device.num_blocks, device.block_size, device.windows)
        length = limits.context_length
        if length > device.context_length:
            raise InvalidConfig("context_length", f"at most the model's {device.context_length}", length)
        capacity = longest_sequence(device.windows, device.num_blocks, device.block_size, length)
        if length > capacity:
            raise InvalidConfig("context_length", f"at most the {capacity} tokens that the KV memory holds", length)
        if not 0 <= device.lookahead < device.block_size:
            raise InvalidConfig("lookahead", f"less than a block of {device.block_size} tokens", device.lookahead)
        self.device = device
        self.limits = limits
        # Behind one draw; less than a block, so that the next step needs at most one more. 0: each token is drawn.
        self.most_forced = min(MAX_FORCED, device.block_size - 1)
        self.predictor = StepTimePredictor(device.costs)
        self.scheduler = Scheduler(self.pool, limits, self.copy_block, self.predictor, device.lookahead)
        self.step_queue = StepQueue(device, clock)
        # Of a step that a command committed; the next ``step`` returns it.
        self.committed_output: StepOutput | None = None
        self.transfers = KvTransfers(self, checksum)
        self.sequences: dict[str, EngineSequence] = {}
        self.parked: dict[str, EngineSequence] = {}
        self.steps = 0
        self.planned_tokens = 0  # of the running step, or of the last one
        self._clock = clock
        self._num_added = 0
        self._committed_at = 0.0
        self._failure: Exception | None = None  # of a step that a command committed
        self._ended: list[SequenceFinished] = []
        self._retired_adapters: set[str] = set()

    # -- receive ------------------------------------------------------------------------------------------------

    def add(self, request: Request, forks: Iterable[Request] = ()) -> None:
        """Queue a sequence, and ``forks`` of it: further outputs of the same prompt, which is computed once.

        They start together, each with its own tokens, if it has any. Until then the end of the first ends them all.
        Raises InvalidRequest. An id is free again once a step has emitted its end and its export, if any, is released.
        """
        root = self.new_sequence(request, forks)
        for sequence in (root, *root.forks):
            self.sequences[sequence.id] = sequence
        self.scheduler.add(root)

    def cancel(self, id: str, keep: int | None = None) -> bool:
        """End a sequence or arrival in any state and free its blocks; False if the id is unknown.

        Forks that wait for its prompt end with it. An arrival ends without an event; an open export keeps its lease.
        With ``keep``, blocks behind the first ``keep`` tokens are not cached. Blocks that a launched step uses are
        freed when it ends.
        """
        arrival = self.transfers.arrivals.get(id)
        if arrival is not None:
            arrival.abort()
        sequence = self.sequences.get(id)
        if sequence is not None:
            self.scheduler.start_forks(sequence, len(self.transfers.arrivals))
            self._end(sequence, FinishReason.CANCELLED)
            if keep is not None:
                self.evict_cached(sequence.tokens, sequence.request.cache_salt, keep)
        return sequence is not None or arrival is not None

    def evict_cached(self, tokens: Sequence[int], salt: bytes, keep: int) -> None:
        """Evict cached blocks behind the first ``keep`` tokens; held ones stay published."""
        size = self.pool.block_size
        hashes = hash_blocks(root_hash(salt), tokens, size)[keep // size :]
        self.step_queue.call_after_releases(partial(self.pool.evict, hashes))

    def add_adapter(self, prepared: PreparedAdapter) -> None:
        """Have the device compute with an adapter. Raises AdapterRefused if it has no memory for it."""
        self.device.adapters.add(prepared)
        self._retired_adapters.discard(prepared.digest)

    def remove_adapter(self, digest: str) -> None:
        """Drop an adapter as soon as no sequence has it."""
        self._retired_adapters.add(digest)
        self._drop_unused_adapters()

    def _drop_unused_adapters(self) -> None:
        if self.step_queue:
            return  # a launched step may compute with them
        arrivals = (arrival.sequence for arrival in self.transfers.arrivals.values())
        used = {sequence.request.adapter for sequence in (*self.sequences.values(), *arrivals)}
        for digest in self._retired_adapters - used:
            self._retired_adapters.discard(digest)
            self.device.adapters.remove(digest)

    def park(self, id: str) -> None:
        self.commit_in_flight()
        sequence = self.sequences.get(id)
        if sequence is None or id in self.parked or sequence.block_table is None:
            raise UnknownSequence(f"{id} is not running here")
        self.set_aside(sequence)

    def set_aside(self, sequence: EngineSequence) -> None:
        """Park a sequence, also one that waits; no step in flight may have it."""
        self.scheduler.remove(sequence)
        self.parked[sequence.id] = sequence

    def resume(self, id: str) -> None:
        self.commit_in_flight()  # it may preempt another
        sequence = self.parked.pop(id, None)
        if sequence is None:
            raise UnknownSequence(f"{id} is not parked here")
        self.scheduler.add(sequence)

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        queued = self.scheduler.running or self.scheduler.waiting or self.step_queue
        return bool(queued or self._ended or self.committed_output is not None)

    def step(self) -> StepOutput:
        """Run a step; after ``commit_in_flight``, return what that committed, without waiting."""
        if self._failure is not None:
            raise self._failure
        output, self.committed_output = self.committed_output, None
        if output is None:
            output = self._run_step(ahead=True)
        else:
            self.step_queue.launch(self.scheduler, len(self.transfers.arrivals))
        output.available_blocks = self.pool.available_blocks
        output.ended, self._ended = self._ended, []
        if self._retired_adapters:
            self._drop_unused_adapters()
        return output

    def commit_in_flight(self) -> None:
        """Commit the step in flight: until the next step, only commands change sequences.

        After a failure, every later step fails too, as rows of the failed one may be half committed.
        """
        if self._failure is not None:
            raise self._failure
        if self.step_queue:
            try:
                self.committed_output = self._run_step(ahead=False)
            except Exception as error:
                self._failure = error
                raise

    def _run_step(self, *, ahead: bool) -> StepOutput:
        output, reserved_slots = StepOutput(self.steps, [], [], [], [], []), len(self.transfers.arrivals)
        step = self.step_queue.launch(self.scheduler, reserved_slots)
        self.planned_tokens = output.num_tokens = step.plan.num_tokens if step else 0
        if step:
            if ahead:
                self.step_queue.launch_ahead(self.scheduler, reserved_slots)
            self._commit(step, self.step_queue.finish(), output)
            self.steps += 1
        return output

    def _commit(self, step: LaunchedStep, result: StepResult, output: StepOutput) -> None:
        """Commit a step. The common path is inlined, for steps of hundreds of rows."""
        now, size, started = self._clock(), self.pool.block_size, max(step.started, self._committed_at)
        self._committed_at = now
        self.predictor.note(step.plan.decodes, step.plan.prompts, now - started)
        plan, sequences, result = step.drop_ended(result)
        for index, why in result.failed.items():  # its KV may not be finite either, so none of it stays cached
            sequence = sequences[index]
            self._end(sequence, FinishReason.FAILED, detail=why)
            self.pool.unpublish(sequence.hashes(range(len(sequence.tokens) // size), size))
            # What is published when its blocks are released.
            self.evict_cached(sequence.tokens, sequence.request.cache_salt, 0)
        for index, entries in result.prompt_logprobs.items():
            _emit_prompt_logprobs(sequences[index], plan.rows[index].first_logprob, entries, output)
        for index, pooled in result.pooled.items():
            _keep_or_emit_embedding(sequences[index], plan.rows[index].end, pooled, output)
        count, known = len(sequences), result.logprobs
        logprobs = [known.get(index) for index in range(count)] if known else [None] * count
        emit, make = output.tokens.append, tuple.__new__
        for sequence, row, token, logprob in zip(sequences, plan.rows, result.sampled, logprobs, strict=True):
            request, start, end, timeline = sequence.request, sequence.num_computed, row.end, sequence.timeline
            if timeline.scheduled is None:
                timeline.scheduled = started
                cached, tokens, is_fork = start, len(sequence.tokens), sequence.is_fork
                output.started.append(SequenceStarted(request.id, cached, tokens, timeline, is_fork))
            sequence.num_computed = end
            if end % size < end - start and timeline.finished is None:
                self._on_blocks_filled(sequence, start // size, end // size, output)
            if token is None:
                continue
            emit(make(Token, (request.id, end - request.prompt_len, token, logprob)))
            sequence.tokens.append(token)
            timeline.tokens.append(now)
            if token in sequence.stops:
                self._end(sequence, FinishReason.STOP, stop_token=token)
            elif end + 1 >= sequence.next_check_length and self._finish_or_park(sequence):
                output.parked.append(request.id)
        for index, further in result.further.items():
            self._commit_further(sequences[index], further, now, output)
        if step.guides:
            self._commit_forced([step.sequences[index] for index in step.guides], now, output)

    def _commit_further(
        self, sequence: EngineSequence, further: Sequence[FurtherToken], now: float, output: StepOutput
    ) -> None:
        """Commit a row's tokens up to the one that ends or parks its sequence.

        Slots behind ``num_computed`` may hold KV of rejected tokens, which is never published and is overwritten.
        """
        size = self.pool.block_size
        for token in further:
            if not self._continues(sequence):
                return
            sequence.num_computed += 1
            if sequence.num_computed % size == 0:
                filled = sequence.num_computed // size
                self._on_blocks_filled(sequence, filled - 1, filled, output)
            self._append(sequence, token, now, output)

    def _commit_forced(self, sequences: Iterable[EngineSequence], now: float, output: StepOutput) -> None:
        """Append what the grammars of sequences that drew a token leave no choice of."""

        def append(sequence: EngineSequence, token: int) -> bool:
            self._append(sequence, FurtherToken(token), now, output)
            return self._continues(sequence)

        drawn = [each for each in sequences if self._continues(each)]
        for sequence in drawn:
            sequence.num_forced = 0
        fixed = self.device.costs.fixed
        if not fixed or len(drawn) <= ROWS_PER_SECOND * fixed:
            append_forced(filter(self._may_be_forced, drawn), self.device.eos_token_ids, self.most_forced, append)

    def _may_be_forced(self, sequence: EngineSequence) -> bool:
        """Not where logits are returned, nor before a handoff: it moves a sequence that lacks one token's KV."""
        request = sequence.request
        is_parked_later = request.park_after is not None and sequence.num_output < request.park_after
        return request.logprobs is None and not is_parked_later and not self.transfers.is_exported(sequence)

    def _continues(self, sequence: EngineSequence) -> bool:
        return self.sequences.get(sequence.id) is sequence and sequence.id not in self.parked

    def _append(self, sequence: EngineSequence, further: FurtherToken, now: float, output: StepOutput) -> None:
        token, logprobs = further
        output.tokens.append(Token(sequence.id, sequence.num_output, token, logprobs))
        sequence.tokens.append(token)
        sequence.timeline.tokens.append(now)
        if token in sequence.stops:
            self._end(sequence, FinishReason.STOP, stop_token=token)
        elif len(sequence.tokens) >= sequence.next_check_length and self._finish_or_park(sequence):
            output.parked.append(sequence.id)

    def _finish_or_park(self, sequence: EngineSequence) -> bool:
        request, length, max_tokens = sequence.request, len(sequence.tokens), sequence.request.stop.max_tokens
        if max_tokens is not None and length - request.prompt_len >= max_tokens:
            self._end(sequence, FinishReason.LENGTH)
        elif length >= self.limits.context_length:
            self._end(sequence, FinishReason.CONTEXT_LENGTH)
        else:
            sequence.next_check_length = request.next_check_length(length, self.limits.context_length)
            self.set_aside(sequence)
            return True
        return False

    def _end(
        self,
        sequence: EngineSequence,
        reason: FinishReason,
        *,
        stop_token: int | None = None,
        detail: str = "",
    ) -> None:
        for fork in list(sequence.forks):
            self._end(fork, reason, detail=detail)
        del self.sequences[sequence.id]
        if self.parked.pop(sequence.id, None) is None:
            self.scheduler.remove(sequence)
        self.scheduler.forks.remove(sequence)
        if sequence.siblings:
            sequence.siblings.remove(sequence)
        self.step_queue.call_when_unused(sequence, partial(self.scheduler.release, sequence))
        self.transfers.on_sequence_end(sequence)
        sequence.timeline.finished = self._clock()
        fault = None if sequence.state is None or sequence.state.guide is None else sequence.state.guide.error
        self._ended.append(SequenceFinished(sequence.id, reason, sequence.timeline, stop_token, detail, fault))

    def _on_blocks_filled(self, sequence: EngineSequence, first: int, stop: int, output: StepOutput) -> None:
        prompt_blocks = len(sequence.request.token_ids) // self.pool.block_size
        if first < prompt_blocks:
            self.scheduler.publish(sequence, range(first, min(stop, prompt_blocks)))
        self.transfers.on_blocks_filled(sequence, first, stop, output)
        if sequence.block_table:
            sequence.block_table.free_unseen(sequence.num_computed)

    # -- inspect ------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        return inspection.load(self)

    def blocks_of(self, ids: Iterable[str]) -> int:
        return inspection.blocks_of(self, ids)

    def check_integrity(self) -> None:
        """Check that blocks, owners and sequences agree. Raises AssertionError."""
        inspection.check_integrity(self)

    def new_sequence(self, request: Request, forks: Iterable[Request] = ()) -> EngineSequence:
        """Make a sequence with its forks, without queueing it. Raises InvalidRequest."""
        root, *others = [self._new_sequence(each) for each in (request, *forks)]
        if others:
            link(root, others)
            check_group(root, self.pool, self.limits.max_running)
        return root

    def _new_sequence(self, request: Request) -> EngineSequence:
        in_use = request.id in self.sequences or self.transfers.uses(request.id)
        if in_use or any(end.id == request.id for end in self._ended):
            raise InvalidRequest("id", "not in use by a live sequence", request.id)
        if request.adapter and request.adapter not in self.device.adapters:
            raise InvalidRequest("adapter", "one that is loaded here", request.adapter)
        check_request(request, self.device.vocab_size, self.device.eos_token_ids, self.limits.context_length)
        if request.embedding is not None:
            check_embedding(request.embedding, self.device.embedding_size)
        self._num_added += 1
        order = priority_key(self.steps, self._num_added, request.priority)
        sequence = EngineSequence(request, order, self._clock())
        sequence.stops = request.stop.ids(self.device.eos_token_ids)
        sequence.next_check_length = request.next_check_length(len(request.token_ids), self.limits.context_length)
        return sequence

    def copy_block(self, source: int, target: int) -> None:
        self.device.write(target, self.device.read(source))


def _emit_prompt_logprobs(
    sequence: EngineSequence, position: int, entries: Sequence[TokenLogprobs], output: StepOutput
) -> None:
    unsent = entries[max(0, sequence.prompt_logprobs_sent - position) :]
    if unsent:
        output.prompt_logprobs.append(PromptLogprobs(sequence.id, sequence.prompt_logprobs_sent, unsent))
        sequence.prompt_logprobs_sent += len(unsent)


def _keep_or_emit_embedding(sequence: EngineSequence, end: int, pooled: Any, output: StepOutput) -> None:
    if end >= sequence.request.prompt_len:
        output.embeddings.append(PromptEmbedding(sequence.id, pooled))
    else:
        assert sequence.state is not None
        sequence.state.pooled = pooled
