"""Batches of changes as messages of ``SubscribeKvEvents``.

A block's hash here is 8 bytes, as in `PrefixCacheUpdate` of worker.proto: a hash over all tokens up to the block's end,
the tenant, the salt and the adapter. The protocol has it as an int64: the same 64 bits, in two's complement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

from decant.protos.vllm import common_pb2 as common
from decant.router.kv_events.feed import Change, EventBatch
from decant.router.kv_events.known_blocks import KnownBlock
from decant.runtime.packed import unpack


def event_batch(batch: EventBatch) -> common.KvEventBatch:
    message = common.KvEventBatch(sequence_number=batch.sequence, timestamp=batch.time)
    events = list(_events(batch.changes))
    if (part := batch.snapshot) is not None:
        message.snapshot.index, message.snapshot.count, message.snapshot.blocks = part.index, part.count, part.blocks
        if not part.index:
            events.insert(0, common.KvCacheEvent(cleared=common.KvCacheCleared()))
    else:
        for number, event in enumerate(events, 1):
            event.event_id = number
    message.events.extend(events)
    return message


def _events(changes: Sequence[Change]) -> Iterator[common.KvCacheEvent]:
    for is_stored, group in groupby(changes, lambda change: isinstance(change, KnownBlock)):
        if is_stored:
            for chain in _chains([change for change in group if isinstance(change, KnownBlock)]):
                yield common.KvCacheEvent(stored=_stored(chain))
        else:
            hashes = [_int64(change.hash) for change in group]
            yield common.KvCacheEvent(removed=common.KvBlocksRemoved(block_hashes=hashes))


def _chains(blocks: Sequence[KnownBlock]) -> Iterator[Sequence[KnownBlock]]:
    """Divide blocks where one is not the parent of the next, or has other names."""
    start = 0
    for place, (before, block) in enumerate(pairwise(blocks), 1):
        if block.parent is not before or block.namespace != before.namespace:
            yield blocks[start:place]
            start = place
    yield blocks[start:]


def _stored(chain: Sequence[KnownBlock]) -> common.KvBlocksStored:
    first = chain[0]
    namespace, parent = first.namespace, first.parent
    return common.KvBlocksStored(
        blocks=[
            common.KvBlock(
                block_hash=_int64(block.hash), token_ids=unpack(block.tokens), block_size=namespace.block_size
            )
            for block in chain
        ],
        parent_block_hash=None if parent is None else _int64(parent.hash),
        lora_name=namespace.adapter or None,
        cache_salt=namespace.cache_salt or None,
    )


def _int64(block_hash: int) -> int:
    return block_hash - (1 << 64) if block_hash >> 63 else block_hash
