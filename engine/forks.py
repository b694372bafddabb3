"""Outputs of one prompt: its KV is computed once, and the sequences of the other outputs start as forks of the first.

    root    [0][1][2][3.]       computes the prompt but for its last token, then goes on as one of the outputs
    fork    [0][1][2]  [3.]     shares the full blocks and has a copy of the partial one
    fork    [0][1][2]    [3.]

Each computes the prompt's last token by itself, so that each draws from a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from decant.engine.blocks import BlockPool
from decant.engine.errors import InvalidRequest, OutOfBlocks
from decant.engine.prefix_index import GroupBlocks
from decant.engine.sequence import Sequence


def link(root: Sequence, forks: Iterable[Sequence]) -> None:
    """Make ``forks`` wait for the prompt of ``root``, which has the same."""
    root.forks = list(forks)
    for fork in root.forks:
        fork.forked_from, fork.is_fork = root, True
    for sequence in (root, *root.forks):
        sequence.siblings = root.siblings
    root.siblings += (root, *root.forks)


def check_group(root: Sequence, pool: BlockPool, max_running: int) -> None:
    """Raise InvalidRequest for more outputs than can ever start together."""
    blocks = pool.blocks_at_once(pool.blocks_for(len(root.tokens) + 1))
    each = max((_blocks_of(fork, pool) for fork in root.forks), default=1)
    most = min(max_running, 1 + (pool.num_blocks - blocks) // each)
    if len(root.forks) >= most:
        prompt, memory = root.request.prompt_len, pool.num_blocks
        limit = f"at most {most}, for a prompt of {prompt} tokens in {memory} blocks of KV memory"
        raise InvalidRequest("n", limit, 1 + len(root.forks))


class PendingForks:
    """Forks that were promised blocks and running slots together with their prompt, and have not started.

    The scheduler owns it. ``copy_block`` copies the bytes of a block to another.
    """

    def __init__(self, pool: BlockPool, copy_block: Callable[[int, int], object]) -> None:
        self._pool = pool
        self._copy_block = copy_block
        self._roots: list[Sequence] = []

    def add(self, root: Sequence) -> None:
        if root.forks:
            self._roots.append(root)

    def remove(self, root: Sequence) -> None:
        """Withdraw the promise, if there is one."""
        if root in self._roots:
            self._roots.remove(root)

    def withdraw(self, fork: Sequence) -> None:
        """Take a fork that has not started from its root."""
        root = fork.forked_from
        assert root is not None
        root.forks.remove(fork)
        fork.forked_from = None
        if not root.forks:
            self.remove(root)

    @property
    def num_sequences(self) -> int:
        return sum(len(root.forks) for root in self._roots)

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks_of(root) for root in self._roots)

    def blocks_of(self, root: Sequence) -> int:
        """Blocks that the forks of a sequence need besides those that they share."""
        return sum(_blocks_of(fork, self._pool) for fork in root.forks)

    def start(self, root: Sequence, free_slots: int) -> list[Sequence]:
        """Start the forks of a computed prompt and return them; those without blocks have to wait, as if preempted.

        That happens if running sequences grew into what was promised, if a fork came with more tokens than were known
        when its blocks were promised, or where a window of the root has left the prompt.
        """
        forks, root.forks = root.forks, []
        self._roots.remove(root)
        for fork in forks:
            fork.forked_from = None
            fork.prompt_logprobs_sent = fork.request.prompt_len  # the root emits them
            if free_slots > 0 and self._share(root, fork):
                free_slots -= 1
        return forks

    def _share(self, root: Sequence, fork: Sequence) -> bool:
        """Give a fork the KV of its root, except of the last token, which it computes itself."""
        pool, table = self._pool, root.block_table
        assert table is not None
        computed = min(root.num_computed, root.request.prompt_len, len(fork.tokens) - 1)
        if any(freed > pool.first_block(group, computed) for group, freed in enumerate(table.num_freed)):
            return False
        full_blocks, partial = divmod(computed, pool.block_size)
        shared = [
            GroupBlocks(freed, blocks[freed:full_blocks])
            for freed, blocks in zip(table.num_freed, table.blocks, strict=True)
        ]
        try:
            fork.block_table = pool.allocate(fork.id, pool.blocks_for(len(fork.tokens)), shared)
        except OutOfBlocks:
            return False
        fork.copy_prefix(root, computed, full_blocks)
        if partial:
            for source, target in zip(table.blocks, fork.block_table.blocks, strict=True):
                self._copy_block(source[full_blocks], target[full_blocks])
        return True


def _blocks_of(fork: Sequence, pool: BlockPool) -> int:
    count, shared = pool.blocks_for(len(fork.tokens)), fork.fork_length // pool.block_size
    return sum(min(count - shared, window.blocks_at_once(count, pool.block_size)) for window in pool.windows)
