"""Handoff bookkeeping of an engine: exports of its sequences, and sequences that arrive with their KV.

export ──> finalize ──> release         sender: lease blocks as they fill, commit, free
       └─> cancel                       the sequence runs on here
reserve ──> join                        receiver: blocks for an arrival, then a running sequence
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from decant.engine.errors import InvalidRequest, OutOfBlocks, UnknownSequence
from decant.engine.output import BlockFilled, StepOutput
from decant.engine.prefix_index import GroupBlocks
from decant.engine.request import Request
from decant.engine.sequence import Sequence
from decant.engine.transfer import (
    BlockAddress,
    Checksum,
    IncomingSequence,
    KvExport,
    TransferCommit,
    block_checksum,
)

if TYPE_CHECKING:
    from decant.engine.engine import Engine


def lease_owner(id: str) -> str:
    return f"lease:{id}"


class KvTransfers:
    """Exports and arrivals by sequence id. All methods run on the engine's thread."""

    def __init__(self, engine: Engine, checksum: Checksum) -> None:
        self.exports: dict[str, KvExport] = {}
        self.arrivals: dict[str, IncomingSequence] = {}
        self._engine = engine
        self._checksum = checksum

    def uses(self, id: str) -> bool:
        return id in self.exports or id in self.arrivals

    # -- sender -------------------------------------------------------------------------------------------------

    def export(self, id: str, cached_blocks: int = 0, siblings: Iterable[str] = ()) -> KvExport:
        """Lease a sequence's filled blocks from block ``cached_blocks`` on, now and as they fill.

        Blocks that its last token does not see are left out. If it has ended, the first of ``siblings`` that lives
        stands in for it. Raises UnknownSequence, InvalidRequest.
        """
        live = (self._engine.sequences[each] for each in (id, *siblings) if each in self._engine.sequences)
        sequence = next(live, None)
        if sequence is None:
            raise UnknownSequence(f"no live sequence {id}")
        size = self._engine.pool.block_size
        most = (len(sequence.tokens) - 1) // size
        if not 0 <= cached_blocks <= most:
            raise InvalidRequest("cached_blocks", f"a whole number from 0 to {most}", cached_blocks)
        if id in self.exports:
            raise InvalidRequest("id", "a sequence without an open export", id)
        pool = self._engine.pool
        lease, last = pool.allocate(lease_owner(id), 0), len(sequence.tokens) - 1
        first = [max(cached_blocks, pool.first_block(group, last)) for group in range(len(pool.windows))]
        self.exports[id] = export = KvExport(sequence, first, lease, self._engine.device)
        export.offer_filled(sequence, sequence.num_computed // size, self._checksum)
        return export

    def finalize(self, id: str) -> TransferCommit:
        """Commit the export of a parked sequence with its siblings, which are parked or have ended.

        All tokens of the request must be computed: the receiver publishes their blocks. A sibling stands in for a
        sequence that ended with its first token. Raises UnknownSequence, InvalidRequest.
        """
        export, sequence = self.exports.get(id), self._engine.parked.get(id)
        if export is not None and sequence is None and id not in self._engine.sequences and export.siblings:
            sequence = self._engine.parked.get(export.siblings[0].id)
        if export is None or export.ended or sequence is None:
            raise UnknownSequence(f"{id} is not parked here with an open export")
        if any(sibling.id not in self._engine.parked for sibling in sequence.siblings):
            raise UnknownSequence(f"an output of {id} is not parked here")
        tokens = len(sequence.request.token_ids)
        if sequence.num_computed < tokens:
            raise InvalidRequest("computed", f"at least the {tokens} tokens of the request", sequence.num_computed)
        return export.finalize(sequence, self._checksum)

    def finalize_running(self, id: str, sent: int) -> TransferCommit | None:
        """Park and commit a running sequence and its siblings once it has no filled block besides the ``sent`` ones.

        Return None if it runs on, as more are unsent or it has generated no token here. Raises UnknownSequence.
        """
        self._engine.commit_in_flight()
        sequence, export = self._engine.sequences.get(id), self.exports.get(id)
        if sequence is None or export is None:
            raise UnknownSequence(f"no live sequence {id} with an open export")
        is_decoding = sequence.block_table is not None and sequence.num_remaining == 1
        filled = sequence.num_computed // self._engine.pool.block_size
        unsent = sum(filled - index for index in export.next_index) + len(export.blocks) - sent
        if not is_decoding or unsent > 0 or sequence.num_computed < len(sequence.request.token_ids):
            return None
        for each in sequence.siblings or (sequence,):
            if each.id not in self._engine.parked:
                self._engine.set_aside(each)
        return self.finalize(id)

    def cancel(self, id: str) -> None:
        """End an export; a sequence that was parked for it runs on, with its siblings."""
        for each in self._parked(id):
            self._engine.resume(each)
        self.release(id)

    def release(self, id: str) -> None:
        """End an export and free its lease; a committed sequence ends with it, as its siblings do, without an event."""
        export = self.exports.get(id)
        if export is None:
            return
        export.release()
        if export.commit is not None and (parked := self._parked(id)):  # none after a cancel: they run on
            for each in parked:
                self._engine.scheduler.release(self._engine.parked.pop(each))
                del self._engine.sequences[each]
            export.siblings.clear()
        del self.exports[id]

    def _parked(self, id: str) -> list[str]:
        export = self.exports.get(id)
        siblings = [each.id for each in export.siblings] if export is not None else []
        return [each for each in siblings or [id] if each in self._engine.parked]

    def on_blocks_filled(self, sequence: Sequence, first: int, stop: int, output: StepOutput) -> None:
        request = sequence.request
        if request.park_after is not None and sequence.block_table:
            pool, last = self._engine.pool, len(sequence.tokens) - 1
            for group, blocks in enumerate(sequence.block_table.blocks):
                for index in range(max(first, pool.first_block(group, last)), stop):
                    address, data = BlockAddress(group, index), self._engine.device.read(blocks[index])
                    sequence.block_checksums[address] = block_checksum(self._checksum, address, data)
        export = self.exports.get(request.id)
        if export is not None and not export.ended:
            for block in export.offer_filled(sequence, stop, self._checksum):
                output.filled.append(BlockFilled(request.id, block.address))

    def on_sequence_end(self, sequence: Sequence) -> None:
        for export in self.exports.values():
            if export.siblings is sequence.siblings and not export.siblings and export.commit is None:
                export.ended = True

    def is_exported(self, sequence: Sequence) -> bool:
        """Whether an open export has the sequence, or a sibling of it."""
        return any(not each.ended and each.siblings is sequence.siblings for each in self.exports.values())

    # -- receiver -----------------------------------------------------------------------------------------------

    def reserve(self, request: Request, forks: Iterable[Request] = ()) -> IncomingSequence:
        """Reserve running slots and the blocks of an arriving sequence and its ``forks``, all or none.

        The cached prefix is pinned; the rest has capacity for all tokens and one more, without blocks that the last
        token does not see. Raises InvalidRequest; OutOfBlocks also while a preempted sequence waits.
        """
        engine, limits = self._engine, self._engine.limits
        sequence = engine.new_sequence(request, forks)
        if len(request.token_ids) >= limits.context_length:
            limit = f"fewer than {limits.context_length} tokens, so that one more fits"
            raise InvalidRequest("token_ids", limit, len(request.token_ids))
        prefix, pool, scheduler = engine.scheduler.cached_prefix(sequence), engine.pool, engine.scheduler
        firsts = [pool.first_block(group, len(sequence.tokens) - 1) for group in range(len(pool.windows))]
        pinned = [
            GroupBlocks(first, blocks[max(0, first - freed) :])
            for first, (freed, blocks) in zip(firsts, prefix.groups, strict=True)
        ]
        count = pool.blocks_for(len(sequence.tokens) + 1)
        is_full = not scheduler.has_slots(sequence, len(self.arrivals))
        if is_full or any(waiting.timeline.scheduled is not None for waiting in scheduler.waiting):
            raise OutOfBlocks(pool.blocks_at_once(count), 0)
        reserved = scheduler.reserved_blocks + scheduler.forks.blocks_of(sequence)
        sequence.block_table = pool.allocate(sequence.id, count, pinned, reserved_blocks=reserved)
        scheduler.forks.add(sequence)

        def on_close(id: str) -> None:
            del self.arrivals[id]
            scheduler.forks.remove(sequence)

        arrival = IncomingSequence(sequence, prefix.num_blocks, engine.device, self._checksum, on_close)
        self.arrivals[request.id] = arrival
        return arrival

    def join(self, arrival: IncomingSequence, commit: TransferCommit) -> None:
        """Make an arrival running sequences: one for each output that has not ended at the sender.

        Raises TransferRejected unless all its blocks are verified.
        """
        self._engine.commit_in_flight()  # it may preempt a sequence
        owner, *forks = arrival.accept(commit)
        for each in (owner, *forks):
            self._engine.sequences[each.id] = each
        self._engine.scheduler.forks.add(owner)
        self._engine.scheduler.add(owner)
