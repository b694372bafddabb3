"""One deliberate fault for each invariant, and the property that finds it: the tests can fail.

A fault is patched into the engine, then the random scripts of ``world`` run as they are; at least one must break,
on the property named beside the fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decant.engine import block_hashes, transfer
from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.costs import StepCostModel
from decant.engine.engine import Engine
from decant.engine.exports import KvTransfers
from decant.engine.fake import FakeDevice
from decant.engine.plan import Row, StepPlan
from decant.engine.scheduler import Limits, Scheduler, _Budget
from decant.engine.sequence import Sequence as EngineSequence
from decant.engine.transfer import BlockRun, IncomingSequence, KvExport, TransferCommit, block_checksum
from tests.engine import state_machine as machine
from tests.engine.factories import (
    OutputLog,
    Payload,
    export_sequence,
    forged,
    import_sequence,
    make_engine,
    make_request,
    run,
    run_alone,
)
from tests.engine.properties import same_output_as_alone
from tests.engine.state_machine import play

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
SEEDS = range(60)


def first_failure() -> str:
    """The message of the first script that breaks a property; empty when all pass."""
    for seed in SEEDS:
        try:
            play(seed)
        except AssertionError as broken:
            return str(broken)
    return ""


# -- faults in the pool -----------------------------------------------------------------------------------------


def leak_a_block(patch: Patch) -> None:
    def give_back(pool: BlockPool, table: BlockTable) -> None:
        if len(table.blocks) > 2:
            table.blocks.pop()
        original(pool, table)

    original = BlockPool.give_back
    patch.setattr(BlockPool, "give_back", give_back)


def leak_a_holding(patch: Patch) -> None:
    """Its references are never dropped."""
    patch.setattr(BlockTable, "release", lambda table: None)


def free_a_block_twice(patch: Patch) -> None:
    def give_back(pool: BlockPool, table: BlockTable) -> None:
        original(pool, table)
        if pool._free:
            pool._free.append(pool._free[-1])

    original = BlockPool.give_back
    patch.setattr(BlockPool, "give_back", give_back)


def share_without_counting(patch: Patch) -> None:
    def acquire(pool: BlockPool, block: int) -> None:
        if pool._refs[block] == 0:
            original(pool, block)

    original = BlockPool.acquire
    patch.setattr(BlockPool, "acquire", acquire)


def hand_out_a_held_block(patch: Patch) -> None:
    def take(pool: BlockPool, count: int) -> list[int]:
        taken = original(pool, count)
        held = [block for block, refs in enumerate(pool._refs) if refs and block not in taken]
        if taken and held:
            pool._refs[taken[0]] = 0
            pool._free.append(taken[0])
            pool._refs[held[0]] += 1
            taken[0] = held[0]
        return taken

    original = BlockPool.take
    patch.setattr(BlockPool, "take", take)


def keep_the_hash_of_an_evicted_block(patch: Patch) -> None:
    def evict(pool: BlockPool, count: int) -> list[int]:
        return [pool._cached.popitem(last=False)[0] for _ in range(count)]

    patch.setattr(BlockPool, "_evict", evict)


def hash_without_the_parent(patch: Patch) -> None:
    """Blocks of equal tokens after other tokens are taken for each other."""

    def hash_blocks(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
        return [original(b"", tokens[at : at + size], size)[0] for at in range(0, len(tokens) - size + 1, size)]

    original = block_hashes.hash_blocks
    patch.setattr("decant.engine.sequence.hash_blocks", hash_blocks)


def mix_the_salts(patch: Patch) -> None:
    """Blocks of one salt are found with another."""
    original = block_hashes.root_hash
    patch.setattr("decant.engine.sequence.root_hash", lambda salt: original(b""))


# -- faults in the scheduler ------------------------------------------------------------------------------------


def publish_too_early(patch: Patch) -> None:
    """All full blocks of the tokens, whatever is computed."""

    def commit(engine: Engine, *step: Any) -> None:
        original(engine, *step)
        for sequence in engine.scheduler.running:
            size = engine.pool.block_size
            engine.scheduler.publish(sequence, range(sequence.computed // size, len(sequence.tokens) // size))

    original = Engine._commit
    patch.setattr(Engine, "_commit", commit)


def publish_more_of_an_answer_than_was_computed(patch: Patch) -> None:
    """On release: the slot of its last token is still empty."""

    def release(scheduler: Scheduler, sequence: EngineSequence) -> None:
        computed, sequence.computed = sequence.computed, len(sequence.tokens)
        original(scheduler, sequence)
        sequence.computed = computed

    original = Scheduler.release
    patch.setattr(Scheduler, "release", release)


def spend_one_token_too_many(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        limits = scheduler.limits
        scheduler.limits = replace(limits, token_budget=limits.token_budget + 1)
        planned = original(scheduler, reserved_slots)
        scheduler.limits = limits
        return planned

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def fill_by_time_alone(patch: Patch) -> None:
    """Where seconds are known, tokens are not counted."""

    def spend(budget: _Budget, sequence: EngineSequence, slots: int | None = None) -> Row:
        limits = budget._limits
        if budget._predictor.costs != StepCostModel():
            budget._limits = replace(limits, token_budget=10**6)
        row = original(budget, sequence, slots)
        budget._limits = limits
        return row

    original = _Budget.spend
    patch.setattr(_Budget, "spend", spend)


def go_on_behind_one_that_was_cut(patch: Patch) -> None:
    def spend(budget: _Budget, sequence: EngineSequence, slots: int | None = None) -> Row:
        row = original(budget, sequence, slots)
        budget._over = False
        return row

    original = _Budget.spend
    patch.setattr(_Budget, "spend", spend)


def give_a_sequence_two_rows(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        (plan, sequences), limits = original(scheduler, reserved_slots), scheduler.limits
        first = plan.rows[0] if plan.rows else None
        total = plan.num_tokens + (first.end - first.start if first else 0)
        if first is None or total > limits.token_budget or len(plan.rows) == limits.max_running:
            return plan, sequences
        return plan._replace(rows=(first, *plan.rows), num_tokens=total), [sequences[0], *sequences]

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def run_one_too_many(patch: Patch) -> None:
    def init(scheduler: Scheduler, pool: BlockPool, limits: Limits, *args: Any) -> None:
        most = limits.max_running + 1
        limits = replace(limits, max_running=most, token_budget=max(most, limits.token_budget))
        original(scheduler, pool, limits, *args)

    original = Scheduler.__init__
    patch.setattr(Scheduler, "__init__", init)


def admit_the_shortest(patch: Patch) -> None:
    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        scheduler.waiting.sort(key=lambda sequence: sequence.remaining)
        return original(scheduler, reserved_slots)

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


def preempt_the_most_urgent(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, _: EngineSequence) -> None:
        original(scheduler, scheduler.running[0])

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def prompts_before_decodes(patch: Patch) -> None:
    def schedule(scheduler: Scheduler, reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        plan, sequences = original(scheduler, reserved_slots)
        return plan._replace(rows=tuple(reversed(plan.rows))), sequences[::-1]

    original = Scheduler.schedule
    patch.setattr(Scheduler, "schedule", schedule)


def forget_a_waiting_one(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, sequence: EngineSequence) -> None:
        original(scheduler, sequence)
        scheduler.waiting.remove(sequence)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def never_admit_a_low_priority(patch: Patch) -> None:
    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        if scheduler.waiting and scheduler.waiting[0].request.priority < 0:
            return None
        return original(scheduler, reserved_slots)

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


def skip_a_token_after_a_hit(patch: Patch) -> None:
    """A prefix hit is taken for one slot more than it has."""

    def admit(scheduler: Scheduler, reserved_slots: int) -> EngineSequence | None:
        sequence = original(scheduler, reserved_slots)
        if sequence and sequence.computed and sequence.remaining > 1:
            sequence.computed += 1
        return sequence

    original = Scheduler._admit_next
    patch.setattr(Scheduler, "_admit_next", admit)


# -- faults on the device and in what is told -------------------------------------------------------------------


def write_into_the_wrong_slot(patch: Patch) -> None:
    def fill(device: FakeDevice, row: Row) -> None:
        original(device, row)
        flipped = device.read(0)
        flipped[3] ^= 1

    original = FakeDevice._fill
    patch.setattr(FakeDevice, "_fill", fill)


def tell_an_end_twice(patch: Patch) -> None:
    def end(engine: Engine, sequence: EngineSequence, *args: object, **more: object) -> None:
        original(engine, sequence, *args, **more)
        engine._ended.append(engine._ended[-1])

    original: Callable[..., None] = Engine._end
    patch.setattr(Engine, "_end", end)


def tell_no_end(patch: Patch) -> None:
    def end(engine: Engine, sequence: EngineSequence, *args: object, **more: object) -> None:
        original(engine, sequence, *args, **more)
        engine._ended.pop()

    original: Callable[..., None] = Engine._end
    patch.setattr(Engine, "_end", end)


def tell_again_after_a_preemption(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, sequence: EngineSequence) -> None:
        sequence.prompt_logprobs_sent = 1
        original(scheduler, sequence)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def draw_by_the_step(patch: Patch) -> None:
    """Random numbers in the order of the calls, as a generator would give them."""

    def counter_uniform(*_: int) -> float:
        return next(numbers)

    numbers: Iterator[float] = ((n * 0.37 + 0.11) % 1 for n in range(10**9))
    patch.setattr("decant.engine.fake.counter_uniform", counter_uniform)


# -- faults in a handoff ----------------------------------------------------------------------------------------


def swap_two_blocks(patch: Patch) -> None:
    """All checksums match, and two blocks are swapped."""

    def accept(arrival: IncomingSequence, commit: TransferCommit) -> EngineSequence:
        came, store = sorted(arrival._checksums), arrival._store
        if len(came) > 1 and arrival.sequence.block_table:
            one, other = (arrival.sequence.block_table.blocks[index] for index in came[:2])
            data = bytes(store.read(one))
            store.write(one, bytes(store.read(other)))
            store.write(other, data)
        return original(arrival, commit)

    original = IncomingSequence.accept
    patch.setattr(IncomingSequence, "accept", accept)


def accept_what_is_missing(patch: Patch) -> None:
    """A block is lost, and the count is not checked."""

    def write(arrival: IncomingSequence, index: int, data: bytes, total: int) -> None:
        if index == arrival.cached_blocks + 1:
            arrival._checksums[index] = total
        else:
            original(arrival, index, data, total)

    original: Callable[..., None] = IncomingSequence.write
    patch.setattr(IncomingSequence, "write", write)


def flip_a_byte_and_forge_the_sum(patch: Patch) -> None:
    def write(arrival: IncomingSequence, index: int, data: bytes, total: int) -> None:
        changed = bytes([data[0] ^ 1]) + data[1:]
        patch.setattr(transfer, "block_checksum", lambda *_: total)
        original(arrival, index, changed, total)
        patch.setattr(transfer, "block_checksum", block_checksum)

    original: Callable[..., None] = IncomingSequence.write
    patch.setattr(IncomingSequence, "write", write)


def end_a_lease_early(patch: Patch) -> None:
    """The blocks go with their sequence, and the export reads what comes after it."""

    def offer(export: KvExport, sequence: EngineSequence, index: int, checksum: transfer.Checksum) -> BlockRun:
        run = original(export, sequence, index, checksum)
        table = export._lease
        if len(table.blocks) > 1:
            last = table.blocks.pop()
            pool = table.pool
            pool._refs[last] -= 1
            table.blocks.append(last)
        return run

    original = KvExport.offer
    patch.setattr(KvExport, "offer", offer)


def run_on_at_both_ends(patch: Patch) -> None:
    """The sender releases the lease but not the sequence."""

    def release(transfers: KvTransfers, id: str) -> None:
        export = transfers.exports.get(id)
        if export is not None:
            export.commit = None
        original(transfers, id)

    original = KvTransfers.release
    patch.setattr(KvTransfers, "release", release)


FAULTS: dict[Callable[[Patch], None], str] = {
    leak_a_block: "reference counts differ",
    leak_a_holding: "are not alive",
    free_a_block_twice: "free twice",
    share_without_counting: "reference counts differ",
    hand_out_a_held_block: "lists a block twice|is shared|shares a block",
    keep_the_hash_of_an_evicted_block: "published|free block has a hash|does not hold|is shared",
    hash_without_the_parent: "stands for two|sequences that differ",
    mix_the_salts: "stands for two|sequences that differ",
    publish_too_early: "published before it was filled",
    publish_more_of_an_answer_than_was_computed: "holds other bytes",
    spend_one_token_too_many: "exceed the budget",
    fill_by_time_alone: "exceed the budget",
    go_on_behind_one_that_was_cut: "which was cut",
    give_a_sequence_two_rows: "two rows",
    run_one_too_many: "exceed|run, at most",
    admit_the_shortest: "overtook|more urgent",
    preempt_the_most_urgent: "more urgent",
    prompts_before_decodes: "mixed up|more urgent",
    forget_a_waiting_one: "in no state",
    never_admit_a_low_priority: "somebody never finishes",
    skip_a_token_after_a_hit: "does not hold|wrote",
    write_into_the_wrong_slot: "does not hold|changed under its lease|holds other bytes",
    tell_an_end_twice: "ended twice",
    tell_no_end: "has no end",
    tell_again_after_a_preemption: "have a gap",
    draw_by_the_step: "wrote|alone",
    swap_two_blocks: "does not hold|holds other bytes",
    accept_what_is_missing: "does not hold|published before it came",
    flip_a_byte_and_forge_the_sum: "does not hold|holds other bytes",
    end_a_lease_early: "reference counts differ",
    run_on_at_both_ends: "after its end|ended twice|token|went on",
}


def test_without_a_fault_every_script_passes() -> None:
    assert first_failure() == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_find(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    monkeypatch.setattr(machine, "MEMORY", {})  # a fault may reach what is expected too
    fault(monkeypatch)
    message = first_failure()
    assert re.search(FAULTS[fault], message), f"found by: {message or 'nothing'}"


# -- one handoff, by hand ---------------------------------------------------------------------------------------

REQUEST = make_request("moved", 14, 20, park_after=3)
CHANGES: dict[str, Callable[[bytes, bytes], tuple[bytes, bytes]]] = {
    "nothing": lambda one, other: (one, other),
    "two blocks swapped": lambda one, other: (other, one),
    "a byte flipped": lambda one, other: (one, other[:5] + bytes([other[5] ^ 1]) + other[6:]),
    "a block lost": lambda one, other: (one, bytes(len(other))),
    "a block twice": lambda one, other: (one, one),
}


def continued(log: OutputLog, payload: Payload) -> OutputLog:
    """The text goes on in another engine."""
    receiver = make_engine()
    import_sequence(receiver, REQUEST, payload)
    return run(receiver, log=log)


@pytest.mark.parametrize("change", CHANGES)
def test_a_fault_with_matching_checksums_changes_the_output(change: str) -> None:
    """A comparison of outputs finds faults that no check could."""
    sender = make_engine()
    log = run(sender, REQUEST)
    payload = export_sequence(sender, REQUEST.id)
    one, other = CHANGES[change](payload.runs[1][1], payload.runs[2][1])
    log = continued(log, forged(payload, {1: one, 2: other}))
    if change == "nothing":
        same_output_as_alone(log[REQUEST.id], run_alone(REQUEST))
    else:
        with pytest.raises(AssertionError, match="wrote"):
            same_output_as_alone(log[REQUEST.id], run_alone(REQUEST))
