from __future__ import annotations


class InvalidBenchmark(Exception):
    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {value}")


class InvalidTarget(InvalidBenchmark):
    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
