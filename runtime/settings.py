"""Base of a process's settings, combined from those of its parts.

    class RouterSettings(LogSettings, ServerSettings):
        queue_limit: int = Field(default=1024, ge=1, description="requests that may wait")

The field is the flag ``--queue-limit``, the variable ``DECANT_QUEUE_LIMIT`` and the file's ``queue_limit``. Fields are
scalars, paths, literals, secrets, or tuples of text (comma separated). Validators of combined classes need different
names: pydantic runs only one of two with the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.fields import FieldInfo

from decant.runtime.error_details import Violation, shorten

PREFIX = "DECANT_"


class Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        fields = cls.model_fields
        return {
            name: split(value) if isinstance(value, str) and name in fields and is_list(fields[name]) else value
            for name, value in values.items()
        }


class SettingError(ValueError):
    def __init__(self, field: str, limit: str, value: object) -> None:
        super().__init__(f"{field}: {limit}, got {shorten(value)}")
        self.field = field
        self.limit = limit
        self.value = value


class InvalidSettings(Exception):
    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("\n".join(_line(violation) for violation in violations))
        self.violations = tuple(violations)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def variable_name(field: str) -> str:
    return PREFIX + field.upper()


def is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def split(text: str) -> tuple[str, ...]:
    return tuple(entry.strip() for entry in text.split(",") if entry.strip())


def _line(violation: Violation) -> str:
    got = f", got {violation.value}" if violation.value else ""
    return f"{violation.field}: {violation.limit}{got}"
