from __future__ import annotations

import hashlib
import struct

_PACK = struct.Struct("<QIQ")


def counter_uniform(seed: int, output_index: int, position: int) -> float:
    """Uniform number in (0, 1) from the arguments alone: the same on any worker, in any batch, after a restart."""
    word = hashlib.blake2b(_PACK.pack(seed, output_index, position), digest_size=8).digest()
    return ((int.from_bytes(word, "little") >> 12) + 0.5) * 2.0**-52
