"""Random numbers that depend on nothing but what they are for."""

from __future__ import annotations

import hashlib
import struct

_PACK = struct.Struct("<QIQ")


def uniform(seed: int, output_index: int, position: int) -> float:
    """The number in (0, 1) for the token at ``position`` (output tokens from 0) of one output of one seed.

    Counter-based (BLAKE2b as the pseudo-random function), so a token's draw is the same on any worker, in any
    batch and after any restart.
    """
    word = hashlib.blake2b(_PACK.pack(seed, output_index, position), digest_size=8).digest()
    return ((int.from_bytes(word, "little") >> 12) + 0.5) * 2.0**-52
