"""The hash of a block of tokens, by which prefix caches find it. Routers use it too."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

BlockHash = bytes
"""Chained digest of a block's tokens, all tokens before them, and a salt (16 bytes)."""

REPORTED_BYTES = 8
"""Workers report so many leading bytes of a hash to routers."""


def root_hash(salt: bytes) -> BlockHash:
    """Start of a hash chain: chains of different salts never match."""
    return hashlib.blake2b(salt, digest_size=16, person=b"decant-kv").digest()


def hash_blocks(parent: BlockHash, tokens: Sequence[int], size: int) -> list[BlockHash]:
    """Digests of the full blocks of ``size`` tokens, each chained to the previous one and the first to ``parent``.

    Two prefixes are equal exactly when their last digests are.
    """
    words = array("Q", tokens)
    data, stride = memoryview(words).cast("B"), words.itemsize * size
    digests = []
    for end in range(stride, len(data) + 1, stride):
        parent = hashlib.blake2b(data[end - stride : end], key=parent, digest_size=16).digest()
        digests.append(parent)
    return digests
