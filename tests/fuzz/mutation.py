"""Inputs like those that an attacker sends: valid ones with small and large changes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

LARGEST = 1 << 16
"""Bytes of a mutated input: a decoder must not need more to show a fault."""
NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**400, 1e308, -1e308, 5e-324, float("inf"), float("nan"))
WORDS = ("", "\x00", "a" * 4096, "\ud800", "é", "{{ x }}", "../../etc/passwd", "%s%n", "1e999")
ODD: Sequence[Any] = (None, True, False, [], {}, [[]], {"a": {}}, *NUMBERS, *WORDS)
BYTES = (b"", b"\x00", b"\xff" * 9, b"\x80" * 11, b"\xff\xff\xff\xff\x0f", b"\x0a", b"\x12\xff\xff\xff\xff\x07")


def mutate(data: bytes, others: Sequence[bytes], choose: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(choose.choice((1, 1, 1, 2, 4, 16))):
        at = choose.randrange(len(changed) + 1)
        end = min(len(changed), at + choose.choice((1, 1, 2, 4, 8, 64)))
        match choose.randrange(7):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << choose.randrange(8)
            case 1:
                changed[at:end] = choose.randbytes(end - at)
            case 2:
                del changed[at:end]
            case 3:
                changed[at:at] = choose.choice(BYTES)
            case 4:
                changed[at:at] = changed[at:end] * choose.choice((1, 2, 100))
            case 5:
                other = choose.choice(others)
                cut = choose.randrange(len(other) + 1)
                changed[at:end] = other[cut : cut + choose.choice((1, 4, 16, len(other)))]
            case _:
                del changed[at:]
    return bytes(changed[:LARGEST])


def mutate_json(text: bytes, choose: random.Random) -> bytes:
    """Change values of a JSON document, or its bytes."""
    if choose.random() < 0.2:
        return mutate(text, [text], choose)
    if choose.random() < 0.02:
        depth = choose.choice((100, 5_000, 30_000))
        return b'{"a":' * depth + b"1" + b"}" * depth if choose.random() < 0.5 else b"[" * depth
    document = json.loads(text)
    for _ in range(choose.choice((1, 1, 2, 4))):
        document = _changed(document, choose)
    return json.dumps(document).encode("utf-8", "surrogatepass")


def mutate_header(data: bytes, choose: random.Random) -> bytes:
    """Change a safetensors file: mostly its header, with a length that fits."""
    if choose.random() < 0.3:
        return mutate(data, [data], choose)
    length = int.from_bytes(data[:8], "little")
    head = mutate_json(data[8 : 8 + length], choose)
    return len(head).to_bytes(8, "little") + head + data[8 + length :]


def mutate_toml(text: bytes, choose: random.Random) -> bytes:
    if choose.random() < 0.02:
        depth = choose.choice((100, 5_000, 30_000))
        return b"a = " + choose.choice((b"[", b"{a=")) * depth
    return mutate(text, [text], choose)


def _changed(node: Any, choose: random.Random) -> Any:
    if choose.random() < 0.3 or not isinstance(node, dict | list) or not node:
        return copy.deepcopy(choose.choice(ODD))
    key = choose.choice(list(node)) if isinstance(node, dict) else choose.randrange(len(node))
    if choose.random() < 0.2:
        del node[key]
    else:
        node[key] = _changed(node[key], choose)
    return node


Mutate = Callable[[bytes, random.Random], bytes]


def of_bytes(seeds: Sequence[bytes]) -> Mutate:
    return lambda seed, choose: mutate(seed, seeds, choose)
