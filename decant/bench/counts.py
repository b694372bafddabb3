from __future__ import annotations

from decant.bench.errors import InvalidBenchmark


def parse_counts(field: str, text: str, least: int) -> tuple[int, ...]:
    """Parse whole numbers separated by commas; each once, ascending. Raises InvalidBenchmark."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise InvalidBenchmark(field, f"whole numbers from {least}, separated by commas", text)
    return tuple(sorted({int(part) for part in parts}))
