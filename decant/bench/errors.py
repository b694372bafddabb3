from __future__ import annotations


class InvalidBenchmark(Exception):
    """What can't be measured, its limit and its value."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {value}")


class InvalidTarget(InvalidBenchmark):
    """An address, a token or a TLS file that no client can use; `text` says which."""

    def __init__(self, text: str) -> None:
        Exception.__init__(self, text)
