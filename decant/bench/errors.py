from __future__ import annotations


class InvalidBenchmark(Exception):
    """What can't be measured, its limit and its value."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {value}")
