from __future__ import annotations

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

_UNSPECIFIED = "UNSPECIFIED"
"""Name of value 0 of each enum, behind the enum's prefix."""


def enum_name(enum: EnumTypeWrapper, value: int) -> str:
    """Name of a value; its number if a newer build sent it."""
    descriptor = enum.DESCRIPTOR.values_by_number.get(value)
    return str(value) if descriptor is None else descriptor.name


def enum_label(enum: EnumTypeWrapper, value: int) -> str:
    """Name of a value in lower case, without the enum's prefix; of value 0 if a newer build sent it."""
    values = enum.DESCRIPTOR.values_by_number
    prefix = values[0].name.removesuffix(_UNSPECIFIED)
    return values.get(value, values[0]).name.removeprefix(prefix).lower()


def enum_labels(enum: EnumTypeWrapper) -> tuple[str, ...]:
    return tuple(enum_label(enum, value) for value in enum.values())
