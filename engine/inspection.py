from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from decant.engine.exports import lease_owner
from decant.engine.output import Load

if TYPE_CHECKING:
    from decant.engine.engine import Engine


def load(engine: Engine) -> Load:
    scheduler, pool = engine.scheduler, engine.pool
    return Load(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        queued_tokens=scheduler.queued_tokens(),
        free_blocks=pool.free_blocks,
        cached_blocks=pool.cached_blocks,
        held_blocks=pool.num_blocks - pool.available_blocks,
        total_blocks=pool.num_blocks,
        preemptions=scheduler.preemptions,
    )


def blocks_of(engine: Engine, ids: Iterable[str]) -> int:
    held: set[int] = set()
    for id in ids:
        sequence, export = engine.sequences.get(id), engine.transfers.exports.get(id)
        if sequence is not None and sequence.block_table:
            held.update(sequence.block_table.held_blocks)
        if export is not None:
            held.update(export.held_blocks)
    return len(held)


def check_integrity(engine: Engine) -> None:
    leases = (lease_owner(id) for id in engine.transfers.exports)
    engine.pool.check_integrity({*engine.sequences, *engine.transfers.arrivals, *leases, *engine.step_queue.ended_ids})
    scheduled = [s.id for s in (*engine.scheduler.running, *engine.scheduler.waiting)]
    scheduled += [fork.id for sequence in engine.sequences.values() for fork in sequence.forks]
    if sorted([*scheduled, *engine.parked]) != sorted(engine.sequences):
        raise AssertionError("a live sequence is in no state, or in two")
    for sequence in engine.sequences.values():
        table, pool = sequence.block_table, engine.pool
        capacity = table.num_blocks * pool.block_size if table else 0
        if table and any(
            freed > pool.first_block(group, sequence.num_computed) for group, freed in enumerate(table.num_freed)
        ):
            raise AssertionError(f"{sequence.id} has freed blocks that its next token sees")
        if table and table.num_blocks != min(map(len, table.blocks)):
            raise AssertionError(f"{sequence.id} has more blocks of the narrowest window than of another")
        if sequence.num_computed > capacity:
            raise AssertionError(f"{sequence.id} has {sequence.num_computed} computed tokens in {capacity} slots")
