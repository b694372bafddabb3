"""Properties checked after every action. Each raises AssertionError; ``mutations`` shows that each can."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import pairwise

from decant.engine.block_hashes import BlockHash
from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice, slot_bytes
from decant.engine.kv_layout import Window
from decant.engine.plan import StepPlan
from decant.engine.request import FinishReason, Request
from decant.engine.sequence import BlockAddress, Timeline
from decant.engine.sequence import Sequence as EngineSequence
from decant.engine.transfer import block_checksum, default_checksum
from tests.engine.factories import SequenceOutput


def live(engine: Engine) -> Mapping[str, EngineSequence]:
    return engine.sequences


def parked(engine: Engine) -> list[str]:
    return list(engine.parked)


# -- a step -----------------------------------------------------------------------------------------------------


def plan_keeps_the_limits(engine: Engine, plan: StepPlan) -> None:
    limits = engine.limits
    spent = sum(row.end - row.start for row in plan.rows)
    assert spent == plan.num_tokens, f"the plan says {plan.num_tokens} tokens and has {spent}"
    assert spent <= limits.token_budget, f"{spent} tokens exceed the budget of {limits.token_budget}"
    assert len(plan.rows) <= limits.max_running, f"{len(plan.rows)} rows exceed {limits.max_running} running"
    for index, row in enumerate(plan.rows):
        assert row.start < row.end <= len(row.tokens) + (index in plan.inputs), (
            f"{row.request.id} has no tokens to compute"
        )
        assert row.end <= min(map(len, row.blocks)) * engine.pool.block_size, (
            f"{row.request.id} has no room for its tokens"
        )


def plan_is_in_order(engine: Engine, plan: StepPlan, ran: Collection[str], forked: Set[str] = frozenset()) -> None:
    """Require decodes, then prompts in progress, then new ones (not among ``ran``); in each the most urgent first.

    Rows of one token of ``forked`` ones may stand among decodes and, right after the fork, among prompts.
    """
    running = {sequence.id: sequence for sequence in engine.scheduler.running}
    rows = [running[row.request.id] for row in plan.rows]
    assert len({sequence.id for sequence in rows}) == len(rows), "a sequence has two rows"
    rows = [sequence for sequence in rows if sequence.id not in forked or sequence.num_remaining > 1]
    places = [(sequence.id not in ran, sequence.id in ran and sequence.num_remaining > 1) for sequence in rows]
    assert places == sorted(places), "decodes, begun prompts and new ones are mixed up"
    for (place, ahead), (other, behind) in pairwise(zip(places, rows, strict=True)):
        fine = place != other or ahead.order <= behind.order
        assert fine, f"{behind.id} is more urgent than {ahead.id} and stands behind it"


def no_prompt_follows_one_that_was_cut(plan: StepPlan, forked: Set[str] = frozenset()) -> None:
    for index, row in enumerate(plan.rows[:-1]):
        if row.request.id in forked and row.end == row.request.prompt_len - 1:
            continue  # its forks start from here
        assert row.end == len(row.tokens) + (index in plan.inputs), f"a row is behind {row.request.id}, which was cut"


def running_keeps_the_limit(engine: Engine) -> None:
    running, most = len(engine.scheduler.running), engine.limits.max_running
    assert running <= most, f"{running} run, at most {most} may"


def changes_are_in_order(
    before: Iterable[EngineSequence],
    running: Iterable[EngineSequence],
    waiting: Iterable[EngineSequence],
    forks: Set[str] = frozenset(),
) -> None:
    """``forks`` waited for sequences that ran before."""
    ran = {sequence.id for sequence in before}
    admitted = [sequence.order for sequence in running if sequence.id not in ran | forks]
    stayed = [sequence.order for sequence in running if sequence.id in ran]
    left = [sequence.order for sequence in waiting]
    preempted = [sequence.order for sequence in waiting if sequence.id in ran]
    if admitted and left:
        assert max(admitted) < min(left), "a sequence overtook a more urgent one that waits"
    if preempted and stayed:
        assert min(preempted) > max(stayed), "a more urgent sequence was preempted"


# -- blocks -----------------------------------------------------------------------------------------------------


def holders(engine: Engine) -> dict[int, list[tuple[EngineSequence, BlockAddress]]]:
    found: dict[int, list[tuple[EngineSequence, BlockAddress]]] = defaultdict(list)
    arriving = [arrival.sequence for arrival in engine.transfers.arrivals.values()]
    for sequence in (*live(engine).values(), *arriving):
        for group, blocks in enumerate(sequence.block_table.blocks if sequence.block_table else ()):
            for index, block in enumerate(blocks):
                if block != engine.pool.null_block:
                    found[block].append((sequence, BlockAddress(group, index)))
    return found


def shared_blocks_are_published_prefixes(engine: Engine, forked: Set[str] = frozenset()) -> None:
    size = engine.pool.block_size
    for block, found in holders(engine).items():
        if len(found) > 1:
            is_published = block in engine.pool.index.published or all(sequence.id in forked for sequence, _ in found)
            assert is_published, f"block {block} is shared and not published"
            meanings = {(at.group, _meaning(sequence, (at.block + 1) * size)) for sequence, at in found}
            assert len(meanings) == 1, f"block {block} is shared by sequences that differ"


def published_blocks_are_filled(engine: Engine) -> None:
    size = engine.pool.block_size
    for block, found in holders(engine).items():
        if block not in engine.pool.index.published:
            continue
        for sequence, at in found:
            arrival = engine.transfers.arrivals.get(sequence.id)
            if arrival is None:
                assert (at.block + 1) * size <= sequence.num_computed, (
                    f"block {block} was published before it was filled"
                )
            else:
                assert at.block < arrival.cached_blocks or at in arrival._checksums, (
                    f"block {block} was published before it came"
                )


def _meaning(sequence: EngineSequence, end: int) -> tuple[bytes, tuple[int, ...]]:
    """Return what the KV of a position depends on: all tokens up to it, and the salt."""
    assert end <= len(sequence.tokens), f"{sequence.id} shares a block that it does not fill"
    return sequence.request.salt, tuple(sequence.tokens[:end])


class Contents:
    def __init__(self) -> None:
        self._expected: dict[tuple[int, BlockHash], bytes] = {}  # by group and hash
        self._meanings: dict[BlockHash, tuple[bytes, tuple[int, ...]]] = {}

    def check(self, engine: Engine) -> None:
        device, size = engine.device, engine.pool.block_size
        assert isinstance(device, FakeDevice)
        for sequence in live(engine).values():
            for group, blocks in enumerate(sequence.block_table.blocks if sequence.block_table else ()):
                slots = _slots(sequence, group, device.windows[group])
                for index, block in enumerate(blocks[: engine.pool.blocks_for(sequence.num_computed)]):
                    if block == engine.pool.null_block:
                        continue
                    expected = b"".join(slots[index * size : (index + 1) * size])
                    found = bytes(device.read(block)[: len(expected)])
                    assert found == expected, f"block {block} does not hold the tokens of {sequence.id}"
                    if len(expected) == engine.device.block_bytes:
                        (block_hash,) = sequence.hashes(range(index, index + 1), size)
                        meaning = _meaning(sequence, (index + 1) * size)
                        self._expected[group, block_hash] = expected
                        assert self._meanings.setdefault(block_hash, meaning) == meaning, (
                            "one hash stands for two prefixes"
                        )
        for block, key in engine.pool.index.published.items():
            kept = self._expected.get(key)
            assert kept is None or bytes(device.read(block)) == kept, f"published block {block} holds other bytes"


def _slots(sequence: EngineSequence, group: int, window: Window) -> list[bytes]:
    slots = [b""]
    for position in range(sequence.num_computed):
        before = slots[-1] if window.first_visible(position) < position else b""
        slots.append(slot_bytes(sequence.tokens[position], position, before, group))
    return slots[1:]


def no_unseen_block_is_held(engine: Engine) -> None:
    """Require that a token at the last block border would see the first block that its sequence holds."""
    pool = engine.pool
    for sequence in live(engine).values():
        if sequence.block_table:
            at_border = sequence.num_computed // pool.block_size * pool.block_size
            for group, freed in enumerate(sequence.block_table.num_freed):
                first = min(pool.first_block(group, at_border), len(sequence.block_table.blocks[group]))
                assert freed >= first, f"{sequence.id} holds a block that no later token sees"


def leases_keep_their_bytes(engine: Engine) -> None:
    for export in engine.transfers.exports.values():
        for block in export.blocks:
            total = block_checksum(default_checksum, block.address, export.read(block.address))
            assert total == block.checksum, f"{block.address} of an export changed under its lease"


def nothing_is_held(engine: Engine) -> None:
    engine.check_integrity()
    load = engine.load()
    assert load.free_blocks + load.cached_blocks + load.held_blocks == load.total_blocks
    transfers = engine.transfers
    busy = (load.running, load.waiting, engine.parked, transfers.arrivals, transfers.exports, load.held_blocks)
    assert not any(busy), f"something is left: {load}"


# -- what is returned -------------------------------------------------------------------------------------------


def same_output_as_alone(result: SequenceOutput, expected: SequenceOutput) -> None:
    assert result.ended is not None, "a sequence has no end"
    id, text, whole = result.ended.id, result.text, expected.text
    if result.reason is FinishReason.CANCELLED:
        whole = whole[: len(text)]
    else:
        assert result.reason is expected.reason, f"{id} ended by {result.reason}, alone by {expected.reason}"
        assert result.prompt_logprobs == expected.prompt_logprobs, f"{id} has other prompt log-probabilities"
    assert text == whole, f"{id} wrote {text}, alone {whole}"
    assert result.logprobs == expected.logprobs[: len(text)], f"{id} has other log-probabilities"


def instants_are_in_order(timeline: Timeline, written: int) -> None:
    assert timeline.finished is not None, "a sequence that ended has no end"
    named = (timeline.added, timeline.scheduled, timeline.first_token, *timeline.tokens, timeline.finished)
    instants = [instant for instant in named if instant is not None]
    assert instants == sorted(instants), f"instants are not in order: {timeline}"
    assert len(timeline.tokens) == written, f"{written} tokens were returned, {len(timeline.tokens)} have a time"


def steps_needed(requests: Sequence[Request], context_length: int) -> int:
    """Upper bound: the most urgent running sequence computes a token per step and is never preempted."""
    return len(requests) * context_length * 2 + 20
