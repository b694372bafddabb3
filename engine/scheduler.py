"""The first law: a sequence has tokens, and a count of those whose KV is computed; a step spends a token budget
to close the gap. There is no prefill phase and no decode phase.

One step, with a budget of 12 tokens and blocks enough::

    running   A  [##########|.]                1   decodes first
              B  [######|.]                    1
              C  [####|.............]          7   then prompts already begun, cut to what is left
    waiting   D  [|...]                        3   then new ones, packed until the budget is filled
              E  [|........................]   0   no budget left: stays, keeps its place

Split prompts, prefix hits, recomputation after a preemption, and sequences that arrive with their KV are all the
same case: ``computed`` starts elsewhere.

The budget is one of tokens and of predicted seconds, whichever is spent first. Decodes are never cut; prompts beside
them get what is left of the step's seconds, so that a chunk shrinks as its context grows, but at least three times as
long as the decodes take, and at least a block.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.costs import NO_WORK, StepCostModel, StepTimePredictor, StepWork
from decant.engine.errors import InvalidConfig, OutOfBlocks, check_whole
from decant.engine.plan import Row, StepPlan
from decant.engine.sequence import Sequence

PROMPT_LOGPROB_CHUNK = 128
"""Most prompt tokens a step computes of a sequence whose every position needs logits (rows x vocabulary)."""

ALONE = 4
"""How much longer than beside decodes a step of prompts alone may take. No answer waits for it, but whoever comes
does: new prompts, arrivals, cancels. Fewer, longer steps spend less on what each step costs."""
BESIDE = 4
"""Where decodes alone take long, a step may take so many times as long as they do: else prompts creep beside them, few
sequences decode at a time, and every step that reads the weights for few is dear."""
LOOK_AHEAD = 32
"""Of how many waiting sequences the cached prefix is looked up to tell the load."""

TOKEN_BUDGET = 512
"""Tokens in a step of a device of which nothing is known."""

LEAST_BUDGET, MOST_BUDGET = 64, 2048
"""Between these a budget is chosen where something is. A longer step is no more efficient."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step and the whole engine may hold.

    token_budget    tokens that one step computes
    max_running     sequences that hold blocks to be stepped, and arrivals on their way to it; at most the token
                    budget, so decodes always fit
    window          longest sequence, in tokens
    step_seconds    predicted seconds that a step with decodes in it is filled up to, or ``BESIDE`` times what those
                    take: an answer's longest wait for its next token; without decodes ``ALONE`` times as many
    """

    token_budget: int = TOKEN_BUDGET
    max_running: int = 256
    window: int = 2048
    step_seconds: float = 0.25

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_running", "window"):
            check_whole(name, getattr(self, name), least=1)
        if not self.step_seconds > 0:
            raise InvalidConfig("step_seconds", "above 0", self.step_seconds)
        if self.max_running > self.token_budget:
            raise InvalidConfig("max_running", f"at most the token budget {self.token_budget}", self.max_running)


def choose_token_budget(costs: StepCostModel, step_seconds: float) -> int:
    """A power of two: the most tokens of a prompt's beginning that a step of prompts alone has the time for."""
    if costs == StepCostModel():
        return TOKEN_BUDGET
    fitting = costs.fitting(ALONE * step_seconds - costs.fixed, 0, MOST_BUDGET)
    return max(LEAST_BUDGET, 1 << fitting.bit_length() >> 1)


class _RunningRows(NamedTuple):
    """Of the running sequences.

    rows, chosen  a row for each that decodes, and who they are
    prompts       those with more than one token to compute
    short         holdings without room for the next token
    decodes       the work of the rows
    """

    rows: list[Row]
    chosen: list[Sequence]
    prompts: deque[Sequence]
    short: list[BlockTable]
    decodes: StepWork


class Scheduler:
    """Waiting and running sequences over one pool. Plain numbers: no clock, no device, no log.

    ``forecast`` says what a step takes; without one, nothing does and the token budget rules alone.
    """

    def __init__(self, pool: BlockPool, limits: Limits, forecast: StepTimePredictor | None = None) -> None:
        self.pool = pool
        self.limits = limits
        self.forecast = forecast or StepTimePredictor(StepCostModel())
        self.waiting: list[Sequence] = []  # both sorted by ``order``, most urgent first
        self.running: list[Sequence] = []
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """A sequence that holds its computed blocks runs on, the least urgent makes place; one without waits."""
        insort(self.running if sequence.holding else self.waiting, sequence, key=_order)
        if len(self.running) > self.limits.max_running:
            self._preempt(self.running[-1])

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; its blocks stay with it."""
        (self.running if sequence.holding else self.waiting).remove(sequence)

    def schedule(self, promised: int = 0) -> tuple[StepPlan, list[Sequence]]:
        """Spend the budget: decodes, then begun prompts, then new ones, each group by order. And whose the rows are.

        ``promised`` places among the running are kept for sequences that are on their way here.
        """
        while len((found := self._survey()).short) > self.pool.available:
            self._preempt(self.running[-1])
        self.pool.grow(found.short)
        rows, chosen, prompts = found.rows, found.chosen, found.prompts  # decodes always fit in the budget
        budget = _Budget(self.limits, self.forecast, found.decodes, self.pool.block_size)
        while budget.left and (sequence := prompts.popleft() if prompts else self._admit_next(promised)):
            rows.append(budget.spend(sequence))
            chosen.append(sequence)
        return StepPlan(tuple(rows), budget.tokens, budget.decodes, budget.prompts), chosen

    @property
    def longest_chunk(self) -> int:
        """How many tokens a step computes that has nothing but the beginning of a long prompt."""
        limits, size = self.limits, self.pool.block_size
        return _Budget(limits, self.forecast, NO_WORK, size).share(0, limits.token_budget)

    def publish(self, sequence: Sequence, filled: range) -> None:
        """Let others share blocks of a sequence that are filled."""
        if filled and sequence.request.use_prefix_cache and sequence.holding:
            blocks = sequence.holding.blocks[filled.start : filled.stop]
            self.pool.publish(blocks, sequence.hashes(filled, self.pool.block_size))

    def release(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks. Those of its output are shared now: until it ends nobody asks for them."""
        if sequence.holding:
            size = self.pool.block_size
            self.publish(sequence, range(len(sequence.request.token_ids) // size, sequence.computed // size))
            sequence.holding.release()
            sequence.holding = None

    def _survey(self) -> _RunningRows:
        found = rows, chosen, prompts, short = list[Row](), list[Sequence](), deque[Sequence](), list[BlockTable]()
        pairs, size = 0, self.pool.block_size
        make = tuple.__new__  # hundreds a step, and a row's own constructor is a call in Python
        for sequence in self.running:
            tokens, computed, holding = sequence.tokens, sequence.computed, sequence.holding
            assert holding, "whoever runs holds blocks"
            blocks, length = holding.blocks, len(tokens)
            if len(blocks) * size < length:
                short.append(holding)
            if computed == length - 1:
                rows.append(make(Row, (sequence.request, tokens, computed, length, blocks, True, sequence.state)))
                chosen.append(sequence)
                pairs += length
            else:
                prompts.append(sequence)
        return _RunningRows(*found, StepWork(len(rows), len(rows), pairs))

    def _preempt(self, sequence: Sequence) -> None:
        """Give up a sequence's blocks; it waits, and recomputes what the prefix cache no longer has."""
        self.remove(sequence)
        self.release(sequence)
        sequence.computed = 0
        self.preemptions += 1
        sequence.timeline.preemptions += 1
        self.add(sequence)

    def _admit_next(self, promised: int) -> Sequence | None:
        """Move the most urgent waiting sequence to the running ones if all its tokens fit now.

        Strictly in order: whoever is behind does not overtake one that is waiting for room. One block for each
        running sequence stays free, so that an arrival does not at once cost a preemption.
        """
        if not self.waiting or len(self.running) + promised >= self.limits.max_running:
            return None
        sequence = self.waiting[0]
        prefix = self.cached_prefix(sequence)
        fresh = self.pool.blocks_for(len(sequence.tokens)) - len(prefix)
        try:
            holding = self.pool.allocate(sequence.id, fresh, prefix, spare=len(self.running))
        except OutOfBlocks:
            return None
        self.remove(sequence)
        sequence.holding = holding
        sequence.computed = len(prefix) * self.pool.block_size
        self.add(sequence)
        return sequence

    def cached_prefix(self, sequence: Sequence) -> list[int]:
        """Published blocks that carry the start of a sequence; always less than all of its tokens."""
        if not sequence.request.use_prefix_cache or sequence.request.prompt_logprobs is not None:
            return []  # positions of a hit have no logits
        size = self.pool.block_size
        return self.pool.match(sequence.hashes(range((len(sequence.tokens) - 1) // size), size))

    def queued_tokens(self) -> int:
        """Tokens still to be computed. Of those that wait longest, without what the prefix cache has of them."""
        found = sum(len(self.cached_prefix(sequence)) for sequence in self.waiting[:LOOK_AHEAD])
        return sum(one.remaining for one in (*self.running, *self.waiting)) - found * self.pool.block_size


class _Budget:
    """What is left of a step for prompts, after its decodes: tokens, and seconds as far as they can be said."""

    def __init__(self, limits: Limits, forecast: StepTimePredictor, decodes: StepWork, block_size: int) -> None:
        self.decodes = decodes
        self.prompts = NO_WORK
        self._limits = limits
        self._forecast = forecast
        alone = limits.step_seconds * ALONE
        self._seconds = max(limits.step_seconds, BESIDE * forecast.seconds(decodes)) if decodes.tokens else alone
        self._least = block_size  # for the first prompt, so that prompts go on however dear they are
        self._over = False

    @property
    def tokens(self) -> int:
        """Spent so far."""
        return self.decodes.tokens + self.prompts.tokens

    @property
    def left(self) -> bool:
        """Whether another prompt gets anything: nobody behind one that was cut does."""
        return not self._over and self.tokens < self._limits.token_budget

    def spend(self, sequence: Sequence) -> Row:
        """The next tokens of a running sequence that fit, at least one."""
        assert sequence.holding is not None
        request, start = sequence.request, sequence.computed
        explained = request.prompt_logprobs is not None
        tokens = self._limits.token_budget - self.tokens
        wanted = min(sequence.remaining, tokens, PROMPT_LOGPROB_CHUNK if explained else tokens)
        end = start + self.share(start, wanted, explained=explained)
        sample = end == len(sequence.tokens)
        row = Row(request, sequence.tokens, start, end, sequence.holding.blocks, sample, sequence.state)
        self.prompts = self.prompts.plus(row.work)
        self._over = end - start < wanted or not self._fitting(0, 1)
        self._least = 1
        return row

    def share(self, context: int, wanted: int, *, explained: bool = False) -> int:
        """How many tokens the next chunk gets, of ``wanted`` that the token budget has room for."""
        return min(wanted, max(self._fitting(context, wanted, explained=explained), self._least))

    def _fitting(self, context: int, most: int, *, explained: bool = False) -> int:
        seconds = self._seconds - self._forecast.seconds(self.decodes, self.prompts)
        return self._forecast.fitting(seconds, context, most, explained=explained)


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.order
