"""Scheduler: which tokens of which sequences the next step computes.

A step spends a token budget on tokens whose KV is not computed. One step, with a budget of 12 tokens and enough
blocks::

    running   A  [##########|.]                1   decodes first
              B  [######|.]                    1
              C  [####|.............]          7   then prompts in progress, cut to the rest of the budget
    waiting   D  [|...]                        3   then new sequences until the budget is spent
              E  [|........................]   0   no budget left: keeps its position in the queue

The budget limits tokens and predicted seconds. Decodes are never cut; those of a token behind which others were forced
compute these too. Prompts get the rest of the seconds, but at least
``STRETCH_FACTOR`` - 1 times those of the step without them, and at least one block.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.costs import NO_WORK, StepCostModel, StepTimePredictor, StepWork
from decant.engine.errors import InvalidConfig, OutOfBlocks, check_int
from decant.engine.forks import PendingForks
from decant.engine.plan import Row, StepPlan
from decant.engine.prefix_index import CachedPrefix
from decant.engine.sequence import Sequence

PROMPT_LOGPROB_CHUNK = 128
"""Most tokens per step of a prompt that needs logits of every position."""

STRETCH_FACTOR = 4
"""A step may take this many times as long as without prompts, if that is more than ``step_seconds``."""
QUEUED_PREFIX_LOOKUPS = 32

TOKEN_BUDGET = 512
"""Tokens of a step without measured costs."""

MIN_TOKEN_BUDGET, MAX_TOKEN_BUDGET = 64, 2048

STEPS_PER_PRIORITY = 256
"""Steps of waiting that a level of priority is worth. ``runtime.priority`` has the same rule in seconds."""


def priority_key(step: int, arrival: int, priority: int) -> tuple[float, int]:
    """Sort key, most urgent first. It never changes, so no sequence starves."""
    return (step - priority * STEPS_PER_PRIORITY, arrival)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a step and of the engine.

    max_running     running sequences and reserved arrivals; at most the token budget, so that decodes always fit
    step_seconds    predicted seconds up to which a step is filled, but see ``STRETCH_FACTOR``
    """

    token_budget: int = TOKEN_BUDGET
    max_running: int = 256
    context_length: int = 2048
    step_seconds: float = 0.25

    def __post_init__(self) -> None:
        check_int("token_budget", self.token_budget, minimum=1)
        check_int("max_running", self.max_running, minimum=1)
        check_int("context_length", self.context_length, minimum=1)
        if not self.step_seconds > 0:
            raise InvalidConfig("step_seconds", "above 0", self.step_seconds)
        if self.max_running > self.token_budget:
            raise InvalidConfig("max_running", f"at most the token budget {self.token_budget}", self.max_running)


def choose_token_budget(costs: StepCostModel, step_seconds: float) -> int:
    """The largest power of two of prompt tokens that fits a step without decodes, within the bounds."""
    if costs == StepCostModel():
        return TOKEN_BUDGET
    seconds = max(step_seconds, STRETCH_FACTOR * costs.fixed) - costs.fixed
    tokens = costs.max_tokens_within(seconds, 0, MAX_TOKEN_BUDGET)
    return max(MIN_TOKEN_BUDGET, 1 << tokens.bit_length() >> 1)


class _RunningRows(NamedTuple):
    rows: list[Row]
    chosen: list[Sequence]
    prompts: deque[Sequence]
    needs_block: list[array[int]]
    decodes: StepWork
    inputs: dict[int, int]


class Scheduler:
    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        copy_block: Callable[[int, int], object],
        predictor: StepTimePredictor | None = None,
        lookahead: int = 0,
    ) -> None:
        self.pool = pool
        self.forks = PendingForks(pool, copy_block)
        self.lookahead = lookahead
        self.limits = limits
        self.predictor = predictor or StepTimePredictor(StepCostModel())
        self.waiting: list[Sequence] = []  # both sorted by ``priority_key``, most urgent first
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.running if sequence.block_table else self.waiting, sequence, key=_order)
        if len(self.running) > self.limits.max_running:
            self._preempt(self.running[-1])

    def remove(self, sequence: Sequence) -> None:
        if sequence.forked_from is not None:
            self.forks.withdraw(sequence)
            return
        (self.running if sequence.block_table else self.waiting).remove(sequence)

    def schedule(self, reserved_slots: int = 0) -> tuple[StepPlan, list[Sequence]]:
        """Plan a step and return it with the sequence of each row; may preempt sequences.

        ``reserved_slots`` of ``max_running`` are kept for arrivals.
        """
        while len((running := self._collect_running()).needs_block) > self.pool.available_blocks:
            self._preempt(self.running[-1])
        return self._plan(running, reserved_slots)

    def schedule_ahead(self, reserved_slots: int = 0) -> tuple[StepPlan, list[Sequence]] | None:
        """Plan the step after the one in flight, before its tokens are known.

        Returns None if blocks are missing, or if a next token is drawn with a state that depends on the one before.
        """
        running = self._collect_running()
        if len(running.needs_block) > self.pool.available_blocks:
            return None
        if any((state := running.rows[index].state) and state.reads_tokens for index in running.inputs):
            return None
        return self._plan(running, reserved_slots)

    def _plan(self, running: _RunningRows, reserved_slots: int) -> tuple[StepPlan, list[Sequence]]:
        self.pool.grow(running.needs_block)
        rows, chosen, prompts = running.rows, running.chosen, running.prompts
        budget = _Budget(self.limits, self.predictor, running.decodes, self.pool.block_size)
        while budget.is_left and (sequence := prompts.popleft() if prompts else self._admit_next(reserved_slots)):
            if sequence.forks and sequence.num_scheduled >= sequence.fork_length:
                prompts.extendleft(reversed(self.start_forks(sequence, reserved_slots)))
                continue
            rows.append(row := budget.spend(sequence, self._max_slots(sequence)))
            chosen.append(sequence)
            _table(sequence).grow(self.pool.blocks_for(row.end))
        return StepPlan(tuple(rows), budget.tokens, budget.decodes, budget.prompts, running.inputs), chosen

    def start_forks(self, root: Sequence, reserved_slots: int) -> list[Sequence]:
        """Start the forks of a computed prompt; return those that can run, behind their root."""
        if not root.forks or root.in_flight is not None or root.num_computed < root.fork_length or not root.block_table:
            return []
        forks = self.forks.start(root, self.limits.max_running - len(self.running) - reserved_slots)
        for fork in forks:
            self.add(fork)
        return [root, *(fork for fork in forks if fork.block_table)]

    @property
    def longest_chunk(self) -> int:
        """Tokens per step of a long prompt without other work."""
        limits, size = self.limits, self.pool.block_size
        return _Budget(limits, self.predictor, NO_WORK, size).chunk_length(0, limits.token_budget)

    def publish(self, sequence: Sequence, filled: range) -> None:
        if not sequence.request.use_prefix_cache or not sequence.block_table:
            return
        table, stop = sequence.block_table, filled.stop
        for group, blocks in enumerate(table.blocks):
            first = max(filled.start, table.num_freed[group])
            if first < stop:
                self.pool.publish(group, blocks[first:stop], sequence.hashes(range(first, stop), self.pool.block_size))

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. Those of the output are published only now: no request has that prefix earlier."""
        if sequence.block_table:
            size = self.pool.block_size
            self.publish(sequence, range(len(sequence.request.token_ids) // size, sequence.num_computed // size))
            sequence.block_table.release()
            sequence.block_table = None

    def _collect_running(self) -> _RunningRows:
        groups = rows, chosen, prompts, needs_block = (
            list[Row](),
            list[Sequence](),
            deque[Sequence](),
            list["array[int]"](),
        )
        num_tokens, pairs, size, inputs = 0, 0, self.pool.block_size, dict[int, int]()
        spare = self.limits.token_budget - self.limits.max_running  # for forced tokens: all decodes fit a step
        make = tuple.__new__  # hundreds a step, and Row's own constructor is a Python call
        for sequence in self.running:
            tokens, computed, block_table = sequence.tokens, sequence.num_computed, sequence.block_table
            assert block_table, "a running sequence has blocks"
            blocks, length, in_flight = block_table.blocks, len(tokens), sequence.in_flight
            if in_flight is not None:
                computed, length = in_flight.end, length + in_flight.draws
                if length >= sequence.next_check_length:
                    continue
                if in_flight.draws:
                    inputs[len(rows)] = in_flight.row
            slots, missing = len(blocks[-1]) * size, length - computed
            is_decode = missing == 1 or missing - 1 <= min(sequence.num_forced, spare)
            if slots < length and (is_decode or slots <= computed):
                needs_block += block_table.shortest_rows
            if is_decode and not sequence.forks:
                rows.append(make(Row, (sequence.request, tokens, computed, length, blocks, True, sequence.state)))
                chosen.append(sequence)
                spare -= missing - 1
                num_tokens += missing
                pairs += missing * computed + missing * (missing + 1) // 2
            else:
                prompts.append(sequence)
        if self.lookahead:
            needs_block += [blocks for sequence in chosen for blocks in self._rows_short_of_lookahead(sequence)]
        return _RunningRows(*groups, StepWork(num_tokens, len(rows), pairs), inputs)

    def _rows_short_of_lookahead(self, sequence: Sequence) -> list[array[int]]:
        table, length = _table(sequence), len(sequence.tokens)
        needed = min(length + self.lookahead, self.limits.context_length)
        return table.shortest_rows if length <= table.num_blocks * self.pool.block_size < needed else []

    def _max_slots(self, sequence: Sequence) -> int:
        more = max(0, self.pool.available_blocks - self.reserved_blocks)
        return _table(sequence).reachable(more) * self.pool.block_size - sequence.num_scheduled

    @property
    def reserved_blocks(self) -> int:
        """Blocks kept for the next tokens of the running sequences and their forks, so that prompts preempt none."""
        return len(self.running) * len(self.pool.windows) + self.forks.num_blocks

    def _preempt(self, sequence: Sequence) -> None:
        self.remove(sequence)
        self.forks.remove(sequence)
        self.release(sequence)
        sequence.num_computed = 0
        if sequence.state is not None:
            sequence.state.pooled = None
        sequence.block_checksums.clear()  # blocks of the prefix cache may have other bits
        self.preemptions += 1
        sequence.timeline.preemptions += 1
        self.add(sequence)

    def _admit_next(self, reserved_slots: int) -> Sequence | None:
        """Admit in order: a sequence never overtakes one that waits for blocks."""
        if not self.waiting or not self.has_slots(self.waiting[0], reserved_slots):
            return None
        sequence = self.waiting[0]
        prefix = self.cached_prefix(sequence)
        count, reserved = self.pool.blocks_for(len(sequence.tokens)), self.reserved_blocks
        forks = self.forks.blocks_of(sequence)
        if self.pool.blocks_at_once(count) + forks <= self.pool.num_blocks:
            reserved += forks
        # Else it has grown since they fitted beside it: they wait, and it does not wait for what can't come.
        try:
            block_table = self.pool.allocate(sequence.id, count, prefix.groups, reserved_blocks=reserved)
        except OutOfBlocks:
            return None
        self.remove(sequence)
        self.forks.add(sequence)
        sequence.block_table = block_table
        sequence.num_computed = prefix.num_blocks * self.pool.block_size
        self.add(sequence)
        return sequence

    def has_slots(self, sequence: Sequence, reserved_slots: int) -> bool:
        """Whether a sequence with its forks may run beside those that run, the arrivals, and the forks of both."""
        needed = len(self.running) + reserved_slots + self.forks.num_sequences + 1 + len(sequence.forks)
        return needed <= self.limits.max_running

    def cached_prefix(self, sequence: Sequence) -> CachedPrefix:
        """Longest cached prefix; at least the last token is left to compute, and all that return more than a token."""
        request, size = sequence.request, self.pool.block_size
        most = len(sequence.tokens) - 1
        if request.computes_from is not None:
            most = min(most, request.computes_from)
        return self.pool.index.longest_prefix(sequence.hashes(range(most // size), size))

    def queued_tokens(self) -> int:
        cached = sum(self.cached_prefix(sequence).num_blocks for sequence in self.waiting[:QUEUED_PREFIX_LOOKUPS])
        return sum(one.num_remaining for one in (*self.running, *self.waiting)) - cached * self.pool.block_size


class _Budget:
    def __init__(self, limits: Limits, predictor: StepTimePredictor, decodes: StepWork, block_size: int) -> None:
        self.decodes = decodes
        self.prompts = NO_WORK
        self._limits = limits
        self._predictor = predictor
        self._seconds = max(limits.step_seconds, STRETCH_FACTOR * predictor.seconds(decodes))
        self._min_tokens = block_size  # for the first prompt, so that prompts progress at any cost
        self._is_spent = False

    @property
    def tokens(self) -> int:
        return self.decodes.tokens + self.prompts.tokens

    @property
    def is_left(self) -> bool:
        return not self._is_spent and self.tokens < self._limits.token_budget

    def spend(self, sequence: Sequence, slots: int) -> Row:
        request, start = sequence.request, sequence.num_scheduled
        max_tokens, all_logits = min(sequence.num_schedulable - start, self._limits.token_budget - self.tokens), False
        if request.prompt_logprobs is not None:
            before = request.prompt_logprobs_from - 1 - start  # tokens that need no logits have rows of their own
            max_tokens, all_logits = min(max_tokens, before if before > 0 else PROMPT_LOGPROB_CHUNK), before <= 0
        end = start + self.chunk_length(start, min(max_tokens, slots), all_logits=all_logits)
        sample = end == len(sequence.tokens)
        row = Row(request, sequence.tokens, start, end, _table(sequence).blocks, sample, sequence.state)
        self.prompts = self.prompts.plus(row.work)
        self._is_spent = end - start < max_tokens or not self._max_tokens(0, 1)
        self._min_tokens = 1
        return row

    def chunk_length(self, context: int, max_tokens: int, *, all_logits: bool = False) -> int:
        return min(max_tokens, max(self._max_tokens(context, max_tokens, all_logits=all_logits), self._min_tokens))

    def _max_tokens(self, context: int, max_tokens: int, *, all_logits: bool = False) -> int:
        seconds = self._seconds - self._predictor.seconds(self.decodes, self.prompts)
        return self._predictor.max_tokens_within(seconds, context, max_tokens, all_logits=all_logits)


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.block_table is not None
    return sequence.block_table


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
