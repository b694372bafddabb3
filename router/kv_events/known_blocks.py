"""Tokens of the blocks of prompts and answers that passed through this router, within a limit of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKEN_BYTES = 4
BLOCK_BYTES = 700
"""Python's memory for a known block besides its tokens: the block, its number, its entries here, its set of children,
and the hash as a worker reports it.
"""


@dataclass(frozen=True, slots=True)
class Namespace:
    """What blocks have in common that may follow each other."""

    model: str
    tenant: str
    adapter: str
    """Name of the adapter; empty: none."""
    cache_salt: str
    block_size: int


class KnownBlock:
    """A full block. ``tokens`` has its token ids, 4 bytes each; ``parent`` is the block before it, None for the first.

    The publisher sets ``is_published``.
    """

    __slots__ = ("children", "hash", "is_published", "namespace", "parent", "tokens")

    def __init__(self, namespace: Namespace, hash: int, parent: KnownBlock | None, tokens: bytes) -> None:
        self.namespace = namespace
        self.hash = hash
        self.parent = parent
        self.tokens = tokens
        self.children: set[KnownBlock] = set()
        self.is_published = False

    @property
    def num_bytes(self) -> int:
        """The first block of a sequence counts the names, which those behind it share."""
        names = 0 if self.parent else len(self.namespace.cache_salt) + len(self.namespace.adapter)
        return BLOCK_BYTES + len(self.tokens) + 4 * names


class KnownBlocks:
    """Blocks by model and hash. The least recently used ones leave first, and children before their parents, because
    each use of a block counts as a later use of the blocks before it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.num_bytes = 0
        self._limit_bytes = limit_bytes
        self._blocks: OrderedDict[tuple[str, int], KnownBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, model: str, block_hash: int) -> KnownBlock | None:
        return self._blocks.get((model, block_hash))

    def add(
        self, namespace: Namespace, hashes: Sequence[int], tokens: bytes, parent: KnownBlock | None = None
    ) -> list[KnownBlock]:
        """Add blocks of a sequence with these hashes and tokens, behind ``parent``; return those that are new.

        The blocks before ``parent`` have to be used after these: add the sequence up to it once more. Call ``shrink``
        afterwards.
        """
        blocks, model, stride = self._blocks, namespace.model, namespace.block_size * TOKEN_BYTES
        new = []
        for number, block_hash in enumerate(hashes):
            block = blocks.get((model, block_hash))
            if block is None:
                start = number * stride
                block = KnownBlock(namespace, block_hash, parent, tokens[start : start + stride])
                blocks[model, block_hash] = block
                self.num_bytes += block.num_bytes
                new.append(block)
                if parent is not None:
                    parent.children.add(block)
            elif parent is None and block.namespace == namespace:
                namespace = block.namespace  # one object for a chain saves memory
            parent = block
        for block_hash in reversed(hashes):
            blocks.move_to_end((model, block_hash))
        return new

    def shrink(self) -> Iterator[KnownBlock]:
        """Remove blocks until the rest is within the limit; yield each."""
        while self.num_bytes > self._limit_bytes:
            _, block = self._blocks.popitem(last=False)
            self.num_bytes -= block.num_bytes
            if block.parent is not None:
                block.parent.children.discard(block)
            yield block
