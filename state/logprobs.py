"""Logprobs as bytes: one entry for each token, all entries of one request equally long.

    | logprob f4 | rank u4 | id u4, logprob f4 of the likeliest | ... as many alternatives as were asked for |

Little-endian. Those of the output lie beside the journal and are appended together with it, by the same rule; those of
the prompt are written once. An alternative that is lacking, as in a vocabulary of fewer tokens, has the id NONE.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from protos.worker_pb2 import TokenLogprobs

NONE = (1 << 32) - 1


def entry_bytes(alternatives: int) -> int:
    """How long one entry is."""
    return 8 * (1 + alternatives)


def pack(found: Iterable[TokenLogprobs], alternatives: int) -> bytes:
    """Alternatives beyond those that were asked for are left out."""
    layout = struct.Struct("<fI" + "If" * alternatives)
    return b"".join(layout.pack(one.logprob, one.rank, *_top(one, alternatives)) for one in found)


def unpack(data: bytes, alternatives: int) -> list[TokenLogprobs]:
    """Raises ValueError when the bytes end within an entry."""
    size = entry_bytes(alternatives)
    if len(data) % size:
        raise ValueError(f"logprobs: {len(data)} bytes are not whole entries of {size}")
    return [_one(numbers) for numbers in struct.iter_unpack("<fI" + "If" * alternatives, data)]


def _top(one: TokenLogprobs, alternatives: int) -> list[float]:
    pairs = [*zip(one.top_ids, one.top_logprobs, strict=True)][:alternatives]
    pairs += [(NONE, 0.0)] * (alternatives - len(pairs))
    return [number for pair in pairs for number in pair]


def _one(numbers: Sequence[float]) -> TokenLogprobs:
    logprob, rank, *top = numbers
    kept = [(int(id), value) for id, value in zip(top[::2], top[1::2], strict=True) if id != NONE]
    return TokenLogprobs(
        logprob=logprob, rank=int(rank), top_ids=[id for id, _ in kept], top_logprobs=[value for _, value in kept]
    )
