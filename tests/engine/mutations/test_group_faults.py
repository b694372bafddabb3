from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from decant.engine.blocks import BlockPool, BlockTable
from decant.engine.errors import OutOfBlocks
from decant.engine.kv_layout import FULL, Window
from decant.engine.prefix_index import GroupBlocks, PrefixIndex
from tests.engine.mutations.harness import Patch, check_found, first_failure
from tests.engine.state_machine import SLIDING

pytestmark = pytest.mark.slow

MIXED = (FULL, SLIDING)


def free_a_block_too_early(patch: Patch) -> None:
    def free_unseen(table: BlockTable, position: int) -> None:
        original(table, position + table.pool.block_size)

    original = BlockTable.free_unseen
    patch.setattr(BlockTable, "free_unseen", free_unseen)


def find_blocks_of_any_group(patch: Patch) -> None:
    def init(index: PrefixIndex, block_size: int, windows: Sequence[Window]) -> None:
        original(index, block_size, windows)
        index._blocks = (index._blocks[0],) * len(windows)

    original = PrefixIndex.__init__
    patch.setattr(PrefixIndex, "__init__", init)


def ask_too_much_of_a_prefix_hit(patch: Patch) -> None:
    def longest_windowed(index: PrefixIndex, hashes: Sequence[bytes]) -> int:
        windowed = index._blocks[-1]
        return max((count for count, block_hash in enumerate(hashes, 1) if block_hash in windowed), default=0)

    patch.setattr(PrefixIndex, "_longest_windowed", longest_windowed)


def allocate_some_groups_only(patch: Patch) -> None:
    def allocate(
        pool: BlockPool, owner: str, count: int, prefix: Sequence[GroupBlocks] = (), reserved_blocks: int = 0
    ) -> BlockTable:
        try:
            return original(pool, owner, count, prefix, reserved_blocks)
        except OutOfBlocks:
            if pool.available_blocks:
                pool.allocate_blocks(1)
            raise

    original = BlockPool.allocate
    patch.setattr(BlockPool, "allocate", allocate)


FAULTS: dict[Callable[[Patch], None], str] = {
    free_a_block_too_early: "has freed blocks that its next token sees",
    find_blocks_of_any_group: "hashes and blocks disagree|is shared|does not hold|lists a block twice",
    allocate_some_groups_only: "reference counts differ",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_detect(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_found(fault, FAULTS[fault], monkeypatch, MIXED)


def test_a_hit_without_the_blocks_of_its_window_is_noticed(monkeypatch: Patch) -> None:
    ask_too_much_of_a_prefix_hit(monkeypatch)
    with pytest.raises(KeyError):
        first_failure(MIXED)
