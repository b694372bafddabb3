from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from decant.engine import block_hashes
from decant.engine.blocks import BlockPool, BlockTable
from tests.engine.mutations.harness import Patch, check_found

pytestmark = pytest.mark.slow


def leak_a_block(patch: Patch) -> None:
    def release_table(pool: BlockPool, table: BlockTable) -> None:
        if table.num_blocks > 2:
            table.blocks[0].pop()
        original(pool, table)

    original = BlockPool.release_table
    patch.setattr(BlockPool, "release_table", release_table)


def release_no_table(patch: Patch) -> None:
    patch.setattr(BlockTable, "release", lambda table: None)


def free_a_block_twice(patch: Patch) -> None:
    def release_table(pool: BlockPool, table: BlockTable) -> None:
        original(pool, table)
        if pool._free:
            pool._free.append(pool._free[-1])

    original = BlockPool.release_table
    patch.setattr(BlockPool, "release_table", release_table)


def share_without_counting(patch: Patch) -> None:
    def add_reference(pool: BlockPool, block: int) -> None:
        if pool._ref_counts[block] == 0:
            original(pool, block)

    original = BlockPool.add_reference
    patch.setattr(BlockPool, "add_reference", add_reference)


def allocate_a_held_block(patch: Patch) -> None:
    def allocate_blocks(pool: BlockPool, count: int) -> list[int]:
        taken = original(pool, count)
        held = [block for block, refs in enumerate(pool._ref_counts) if refs and block not in taken]
        if taken and held:
            pool._ref_counts[taken[0]] = 0
            pool._free.append(taken[0])
            pool._ref_counts[held[0]] += 1
            taken[0] = held[0]
        return taken

    original = BlockPool.allocate_blocks
    patch.setattr(BlockPool, "allocate_blocks", allocate_blocks)


def keep_the_hash_of_an_evicted_block(patch: Patch) -> None:
    def evict(pool: BlockPool, count: int) -> list[int]:
        return [pool._cached.popitem(last=False)[0] for _ in range(count)]

    patch.setattr(BlockPool, "_evict", evict)


def hash_without_the_parent(patch: Patch) -> None:
    def hash_blocks(parent: bytes, tokens: Sequence[int], size: int) -> list[bytes]:
        return [original(b"", tokens[at : at + size], size)[0] for at in range(0, len(tokens) - size + 1, size)]

    original = block_hashes.hash_blocks
    patch.setattr("decant.engine.sequence.hash_blocks", hash_blocks)


def mix_the_salts(patch: Patch) -> None:
    original = block_hashes.root_hash
    patch.setattr("decant.engine.sequence.root_hash", lambda salt: original(b""))


FAULTS: dict[Callable[[Patch], None], str] = {
    leak_a_block: "reference counts differ",
    release_no_table: "own no live sequence",
    free_a_block_twice: "free twice",
    share_without_counting: "reference counts differ",
    allocate_a_held_block: "lists a block twice|is shared|shares a block|holds other bytes",
    keep_the_hash_of_an_evicted_block: "published|free block has a hash|does not hold|is shared",
    hash_without_the_parent: "stands for two|sequences that differ",
    mix_the_salts: "stands for two|sequences that differ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_detect(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_found(fault, FAULTS[fault], monkeypatch)
