from __future__ import annotations


class InvalidPlan(Exception):
    """Invalid or impossible plan; the message names what is possible."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {value}")
        self.field = field
        self.limit = limit
        self.value = value
