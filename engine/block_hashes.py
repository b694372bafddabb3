from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""Hash of 16 bytes over a salt and all tokens up to the block's end."""

REPORTED_BYTES = 8
"""Leading bytes of a hash that workers report to routers."""


def cache_salt(salt: bytes, adapter: str) -> bytes:
    """Salt of blocks that were computed with an adapter, of which ``adapter`` is the digest; empty: none."""
    return hashlib.blake2b(salt, key=adapter.encode(), digest_size=16).digest() if adapter else salt


def root_hash(salt: bytes) -> BlockHash:
    return hashlib.blake2b(salt, digest_size=16, person=b"decant-kv").digest()


def hash_blocks(parent: BlockHash, tokens: Sequence[int], size: int) -> list[BlockHash]:
    words = array("Q", tokens)
    data, stride = memoryview(words).cast("B"), words.itemsize * size
    hashes = []
    for end in range(stride, len(data) + 1, stride):
        parent = hashlib.blake2b(data[end - stride : end], key=parent, digest_size=16).digest()
        hashes.append(parent)
    return hashes
