"""Counter-based random numbers: a draw depends on its key alone, not on earlier draws."""

from __future__ import annotations

import hashlib
import struct

_PACK = struct.Struct("<QIQ")


def counter_uniform(seed: int, output_index: int, position: int) -> float:
    """The number in (0, 1) that draws the output token at ``position`` (from 0) of output ``output_index``.

    BLAKE2b over the arguments, so a token's draw is the same on any worker, in any batch and after a restart.
    """
    word = hashlib.blake2b(_PACK.pack(seed, output_index, position), digest_size=8).digest()
    return ((int.from_bytes(word, "little") >> 12) + 0.5) * 2.0**-52
