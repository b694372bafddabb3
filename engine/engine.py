"""The engine: receive, schedule, run, commit, publish. One caller at a time; ``loop`` gives it a thread.

add ──> waiting ──> running ──> Ended           cancel: legal everywhere, Ended follows (an arrival just goes)
           ^           │  │
           └─ preempt ─┘  └──> parked ──> release (or resume: running again)
reserve ──> arrival ──> join: running
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from decant.engine.blocks import BlockPool, hash_blocks, root_hash
from decant.engine.costs import StepTimePredictor
from decant.engine.errors import InvalidConfig, InvalidRequest, OutOfBlocks, UnknownSequence
from decant.engine.output import BlockFilled, Load, PromptLogprobs, SequenceFinished, SequenceStarted, StepOutput, Token
from decant.engine.plan import Device, StepPlan, StepResult, TokenLogprobs
from decant.engine.policy import order_of
from decant.engine.request import FinishReason, Request, check_some_left, check_tokens
from decant.engine.scheduler import Limits, Scheduler
from decant.engine.sequence import Sequence as EngineSequence
from decant.engine.transfer import (
    Checksum,
    IncomingSequence,
    KvExport,
    TransferCommit,
    block_checksum,
    default_checksum,
)


class Engine:
    """Sequences in, tokens out, over one device."""

    def __init__(
        self,
        device: Device,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        checksum: Checksum = default_checksum,
    ) -> None:
        limits = limits or Limits(window=device.window)
        capacity = device.num_blocks * device.block_size
        if limits.window > device.window:
            raise InvalidConfig("window", f"at most the model's {device.window}", limits.window)
        if limits.window > capacity:
            raise InvalidConfig("window", f"at most the {capacity} tokens that the KV memory holds", limits.window)
        self.device = device
        self.limits = limits
        self.pool = BlockPool(device.num_blocks, device.block_size)
        self.forecast = StepTimePredictor(device.costs)
        self.scheduler = Scheduler(self.pool, limits, self.forecast)
        self.steps = 0
        self.planned = 0  # tokens of the step under way, or of the last one
        self._clock = clock
        self._checksum = checksum
        self._arrivals_seen = 0
        self._sequences: dict[str, EngineSequence] = {}
        self._parked: dict[str, EngineSequence] = {}
        self._arriving: dict[str, IncomingSequence] = {}
        self._exports: dict[str, KvExport] = {}
        self._ended: list[SequenceFinished] = []

    # -- receive ------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Take a sequence up. Raises InvalidRequest; then nothing of it was kept and all others go on.

        An id is free again once its end was told by a step and its export, if it had one, is released.
        """
        sequence = self._accept(request)
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, id: str, keep: int | None = None) -> bool:
        """End a sequence in whatever state it is; False when nothing of that id is alive. Frees at once.

        An arrival ends without a word, for it never was a sequence; an open export keeps its lease. With ``keep``, what
        lies behind so many tokens is not cached.
        """
        arrival = self._arriving.get(id)
        if arrival is not None:
            arrival.abort()
        sequence = self._sequences.get(id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)
            if keep is not None:
                self.forget(sequence.tokens, sequence.request.salt, keep)
        return sequence is not None or arrival is not None

    def forget(self, tokens: Sequence[int], salt: bytes, keep: int) -> None:
        """Of these tokens, blocks beyond the first ``keep`` are cached no more, unless somebody holds them."""
        size = self.pool.block_size
        self.pool.forget(hash_blocks(root_hash(salt), tokens, size)[keep // size :])

    def park(self, id: str) -> None:
        """Stop stepping a running sequence and keep its blocks (the last step of a drain). Raises UnknownSequence."""
        sequence = self._running(id)
        self.scheduler.remove(sequence)
        self._parked[id] = sequence

    def resume(self, id: str) -> None:
        """Step a parked sequence on, here, to its end; it may have to wait again. Raises UnknownSequence."""
        sequence = self._parked.pop(id, None)
        if sequence is None:
            raise UnknownSequence(f"{id} is not parked here")
        self.scheduler.add(sequence)

    # -- step ---------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return bool(self.scheduler.running or self.scheduler.waiting or self._ended)

    def step(self) -> StepOutput:
        """One iteration over everything that runs: schedule, run, commit, publish."""
        output = StepOutput(self.steps, [], [], [], [], self._ended)
        self._ended = []
        plan, sequences = self.scheduler.schedule(promised=len(self._arriving))
        self.planned = plan.num_tokens
        if plan.rows:
            started = self._clock()
            result = self.device.run(plan)
            self._commit(plan, sequences, result, started, output)
            self.steps += 1
        output.num_tokens, output.available = plan.num_tokens, self.pool.available
        output.ended.extend(self._ended)
        self._ended = []
        return output

    def _commit(
        self,
        plan: StepPlan,
        sequences: Sequence[EngineSequence],
        result: StepResult,
        started: float,
        output: StepOutput,
    ) -> None:
        """Per row: its KV is computed; a token, if it got one, is told and kept, and ends or parks its sequence.

        What most rows of most steps do is written out here: each call less is a tenth of a millisecond with hundreds.
        """
        now, size = self._clock(), self.pool.block_size
        self.forecast.note(plan.decodes, plan.prompts, now - started)
        for index, why in result.failed.items():
            self._fail(sequences[index], why)
        for index, entries in result.prompt_logprobs.items():
            self._explain(sequences[index], plan.rows[index].start + 1, entries, output)
        count, found = len(sequences), result.logprobs
        logprobs = [found.get(index) for index in range(count)] if found else [None] * count
        tell, make = output.tokens.append, tuple.__new__
        for sequence, row, token, told in zip(sequences, plan.rows, result.sampled, logprobs, strict=True):
            request, start, end, timeline = sequence.request, sequence.computed, row.end, sequence.timeline
            if timeline.scheduled is None:
                timeline.scheduled = started
                output.begun.append(SequenceStarted(request.id, start, len(sequence.tokens), timeline))
            sequence.computed = end
            if end % size < end - start:
                self._fill(sequence, start // size, end // size, output)
            if token is None:
                continue
            tell(make(Token, (request.id, end - request.prompt_len, token, told)))
            sequence.tokens.append(token)
            timeline.tokens.append(now)
            if token in sequence.stops:
                self._end(sequence, FinishReason.STOP, stop_token=token)
            elif end + 1 >= sequence.due and self._is_due(sequence):
                output.parked.append(request.id)

    def _fail(self, sequence: EngineSequence, why: str) -> None:
        """End one whose logits are no numbers. What it computed may be none either: nobody finds it in the cache."""
        self._end(sequence, FinishReason.FAILED, detail=why)
        self.forget(sequence.tokens, sequence.request.salt, 0)

    def _explain(
        self, sequence: EngineSequence, position: int, entries: Sequence[TokenLogprobs], output: StepOutput
    ) -> None:
        """Tell prompt log-probabilities from ``position`` on, once each even when they are computed again."""
        news = entries[max(0, sequence.explained - position) :]
        if news:
            output.prompt_logprobs.append(PromptLogprobs(sequence.id, sequence.explained, news))
            sequence.explained += len(news)

    def _is_due(self, sequence: EngineSequence) -> bool:
        """A sequence is as long as it may get, or (True) parks now."""
        request, length, most = sequence.request, len(sequence.tokens), sequence.request.stop.max_tokens
        if most is not None and length - request.prompt_len >= most:
            self._end(sequence, FinishReason.LENGTH)
        elif length >= self.limits.window:
            self._end(sequence, FinishReason.CONTEXT_LENGTH)
        else:
            sequence.due = request.due(length, self.limits.window)
            self.park(sequence.id)
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
        """The one way out of the engine: from wherever it is, free its blocks, tell its end."""
        del self._sequences[sequence.id]
        if self._parked.pop(sequence.id, None) is None:
            self.scheduler.remove(sequence)
        self.scheduler.release(sequence)
        export = self._exports.get(sequence.id)
        if export is not None and export.sealed is None:
            export.ended = True
        sequence.timeline.finished = self._clock()
        self._ended.append(SequenceFinished(sequence.id, reason, sequence.timeline, stop_token, detail))

    # -- hand over ----------------------------------------------------------------------------------------------

    def export(self, id: str, have: int = 0) -> KvExport:
        """Lease the blocks of a sequence from block ``have`` on, those filled now and those filled later.

        Raises UnknownSequence, InvalidRequest (``have`` beyond all but the last block, or a second export).
        """
        sequence = self._sequences.get(id)
        if sequence is None:
            raise UnknownSequence(f"{id} is not alive here")
        most = (len(sequence.tokens) - 1) // self.pool.block_size
        if not 0 <= have <= most:
            raise InvalidRequest("have", f"a whole number from 0 to {most}", have)
        if id in self._exports:
            raise InvalidRequest("id", "not exported already, or that export released", id)
        export = KvExport(sequence, have, self.pool.allocate(lease_owner(id), 0), self.device)
        self._exports[id] = export
        for index in range(have, sequence.computed // self.pool.block_size):
            export.offer(sequence, index, self._checksum)
        return export

    def seal(self, id: str) -> TransferCommit:
        """Close the account of a parked sequence's export. Raises UnknownSequence, InvalidRequest.

        All tokens that the sequence came with must be computed: what the other end knows of it is published there.
        """
        export, sequence = self._exports.get(id), self._parked.get(id)
        if export is None or export.ended or sequence is None:
            raise UnknownSequence(f"{id} is not parked here with an open export")
        given = len(sequence.request.token_ids)
        if sequence.computed < given:
            raise InvalidRequest("computed", f"at least the {given} tokens of the request", sequence.computed)
        return export.seal(sequence, self._checksum)

    def seal_running(self, id: str, sent: int) -> TransferCommit | None:
        """Park a running sequence and seal it, once no more than its last, unfilled block is left to be sent.

        ``sent``: blocks of its export that went out. None: it runs on, for there are more, or it has not yet written a
        token behind those that it came with. Raises UnknownSequence.
        """
        sequence, export = self._sequences.get(id), self._exports.get(id)
        if sequence is None or export is None:
            raise UnknownSequence(f"{id} is not alive here with an open export")
        is_writing = sequence.holding is not None and sequence.remaining == 1
        left = sequence.computed // self.pool.block_size - export.have - sent
        if not is_writing or left > 0 or sequence.computed < len(sequence.request.token_ids):
            return None
        self.park(id)
        return self.seal(id)

    def withdraw(self, id: str) -> None:
        """End an export as if nothing had been asked: a sequence that was parked for it runs on here."""
        if id in self._parked:
            self.resume(id)
        self.release(id)

    def release(self, id: str) -> None:
        """End an export: give the lease back, and the parked sequence with it once it was sealed."""
        export = self._exports.pop(id, None)
        if export is None:
            return
        export.release()
        if export.sealed is not None and id in self._parked:
            self.scheduler.release(self._parked.pop(id))
            del self._sequences[id]

    def reserve(self, request: Request) -> IncomingSequence:
        """Room for a sequence that comes with its KV: its cached prefix pinned, all other blocks of prompt and
        one token taken, and a place among the running, all or none. Preempted sequences that wait for room go
        first. Raises NoRoom, InvalidRequest."""
        sequence = self._accept(request)
        if len(request.token_ids) >= self.limits.window:
            raise InvalidRequest("token_ids", f"less than {self.limits.window} tokens to go on", len(request.token_ids))
        prefix = self.scheduler.cached_prefix(sequence)
        fresh = self.pool.blocks_for(len(sequence.tokens) + 1) - len(prefix)
        spare = len(self.scheduler.running)
        full = spare + len(self._arriving) >= self.limits.max_running
        if full or any(waiting.timeline.scheduled is not None for waiting in self.scheduler.waiting):
            raise OutOfBlocks(fresh, 0)
        sequence.holding = self.pool.allocate(sequence.id, fresh, prefix, spare=spare)
        arrival = IncomingSequence(sequence, len(prefix), self.device, self._checksum, self._arriving.pop)
        self._arriving[request.id] = arrival
        return arrival

    def join(self, arrival: IncomingSequence, seal: TransferCommit) -> None:
        """Make the sequence exist: all blocks verified, it runs on from the seal. Raises TransferRejected."""
        sequence = arrival.accept(seal)
        self._sequences[arrival.id] = sequence
        self.scheduler.add(sequence)

    def _fill(self, sequence: EngineSequence, first: int, stop: int, output: StepOutput) -> None:
        """Blocks ``first`` up to ``stop`` are full: those of the prompt are shared with others, those that are to be
        handed over are summed, and all are leased to an open export."""
        request = sequence.request
        if first < (prompt := len(request.token_ids) // self.pool.block_size):
            self.scheduler.publish(sequence, range(first, min(stop, prompt)))
        if request.park_after is not None and sequence.holding:
            for index in range(first, stop):
                data = self.device.read(sequence.holding.blocks[index])
                sequence.sums[index] = block_checksum(self._checksum, index, data)
        export = self._exports.get(request.id)
        if export is not None and not export.ended:
            for index in range(export.have + len(export.runs), stop):
                export.offer(sequence, index, self._checksum)
                output.filled.append(BlockFilled(request.id, index))

    # -- look ---------------------------------------------------------------------------------------------------

    def load(self) -> Load:
        """How busy the engine is now."""
        scheduler, pool = self.scheduler, self.pool
        return Load(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            parked=len(self._parked),
            arriving=len(self._arriving),
            exports=len(self._exports),
            queued_tokens=scheduler.queued_tokens(),
            free_blocks=pool.free,
            cached_blocks=pool.cached,
            held_blocks=pool.num_blocks - pool.available,
            total_blocks=pool.num_blocks,
            preemptions=scheduler.preemptions,
            steps=self.steps,
        )

    def blocks_of(self, ids: Iterable[str]) -> int:
        """How many blocks these sequences and their exports hold, each block counted once."""
        held: set[int] = set()
        for id in ids:
            sequence, export = self._sequences.get(id), self._exports.get(id)
            if sequence is not None and sequence.holding:
                held.update(sequence.holding.blocks)
            if export is not None:
                held.update(export.blocks)
        return len(held)

    def check_integrity(self) -> None:
        """Every block is free, cached, or held for someone who is alive. Raises AssertionError."""
        alive = {*self._sequences, *self._arriving, *(lease_owner(id) for id in self._exports)}
        self.pool.check_integrity(alive)
        scheduled = [s.id for s in (*self.scheduler.running, *self.scheduler.waiting)]
        if sorted([*scheduled, *self._parked]) != sorted(self._sequences):
            raise AssertionError("a live sequence is in no state, or in two")
        for sequence in self._sequences.values():
            room = len(sequence.holding.blocks) * self.pool.block_size if sequence.holding else 0
            if sequence.computed > room:
                raise AssertionError(f"{sequence.id} has {sequence.computed} computed tokens in room for {room}")

    # -- helpers ------------------------------------------------------------------------------------------------

    def _accept(self, request: Request) -> EngineSequence:
        """A raw request becomes a sequence, or InvalidRequest says what is wrong with it."""
        self._validate(request)
        self._arrivals_seen += 1
        order = order_of(self.steps, self._arrivals_seen, request.priority)
        sequence = EngineSequence(request, order, self._clock())
        sequence.stops = request.stop.ids(self.device.eos_token_ids)
        sequence.due = request.due(len(request.token_ids), self.limits.window)
        return sequence

    def _validate(self, request: Request) -> None:
        vocabulary, window = self.device.vocab_size, self.limits.window
        alive = request.id in self._sequences or request.id in self._arriving or request.id in self._exports
        if alive or any(ended.id == request.id for ended in self._ended):
            raise InvalidRequest("id", "not alive already", request.id)
        if len(request.token_ids) > window:
            raise InvalidRequest("token_ids", f"at most {window} tokens", len(request.token_ids))
        named = {"token_ids": request.token_ids, "stop_token_ids": request.stop.stop_token_ids}
        named["logit_bias"] = tuple(request.sampling.logit_bias)
        for field, tokens in named.items():
            check_tokens(field, tokens, vocabulary)
        check_some_left(request.stop, self.device.eos_token_ids, vocabulary)
        written = len(request.token_ids) - request.prompt_len
        if request.stop.max_tokens is not None and written >= request.stop.max_tokens:
            raise InvalidRequest("max_tokens", f"more than the {written} tokens already written", written)
        if written and len(request.token_ids) >= window:
            raise InvalidRequest("token_ids", f"less than {window} tokens with output", len(request.token_ids))

    def _running(self, id: str) -> EngineSequence:
        sequence = self._sequences.get(id)
        if sequence is None or id in self._parked or sequence.holding is None:
            raise UnknownSequence(f"{id} is not running here")
        return sequence


def lease_owner(id: str) -> str:
    """Whom the pool names as the owner of the blocks that the export of sequence ``id`` holds."""
    return f"lease:{id}"
