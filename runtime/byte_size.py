from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

BYTE_SIZE = "a size above 0, such as 512M or 2G"


def parse_byte_size(text: str) -> int:
    """Parse a number of bytes with a binary unit: 512M, 512Mi, 512 MiB and 512mb are equal. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B|i)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match is not None else 0
    if not size:
        raise ValueError(f"{BYTE_SIZE}, got {text}")
    return size
