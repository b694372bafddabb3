"""Errors of a plan."""

from __future__ import annotations


class InvalidPlan(Exception):
    """An input that can't be parsed or that no deployment can satisfy; the message says what is possible instead."""

    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {value}")
        self.field = field
        self.limit = limit
        self.value = value
