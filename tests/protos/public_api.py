"""What clients of ``decant.v1`` rely on, a line each: python -m tests.protos.public_api adds what is new.

A line that changes or goes is a breaking change: it needs another package, such as ``decant.v2``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from decant.protos import inference_pb2

FILE = Path(__file__).with_suffix(".txt")
TYPES = {number: name[5:].lower() for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}


def lines_of(file: FileDescriptor = inference_pb2.DESCRIPTOR) -> list[str]:
    return sorted([*_methods(file), *_enums(file.enum_types_by_name.values()), *_messages(file)])


def broken(recorded: list[str], present: list[str]) -> list[str]:
    """Lines that clients rely on and that no longer hold."""
    return sorted(set(recorded) - set(present))


def _methods(file: FileDescriptor) -> Iterator[str]:
    for service in file.services_by_name.values():
        for method in service.methods:
            call = [
                f"{'stream ' if streams else ''}{message.full_name}"
                for streams, message in (
                    (method.client_streaming, method.input_type),
                    (method.server_streaming, method.output_type),
                )
            ]
            yield f"rpc {method.full_name}({call[0]}) returns ({call[1]})"


def _messages(file: FileDescriptor) -> Iterator[str]:
    waiting: list[Descriptor] = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_types)
        yield f"message {message.full_name}"
        yield from (f"field {_field(field)}" for field in message.fields)
        yield from _enums(message.enum_types)


def _field(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof
    is_optional = oneof is not None and oneof.name == f"_{field.name}"
    label = "repeated " if field.is_repeated else "optional " if is_optional else ""
    choice = f" of {oneof.name}" if oneof is not None and not is_optional else ""
    return f"{field.full_name} = {field.number}: {label}{kind.full_name if kind else TYPES[field.type]}{choice}"


def _enums(enums: Iterable[EnumDescriptor]) -> Iterator[str]:
    for enum in enums:
        yield from (f"value {enum.full_name}.{value.name} = {value.number}" for value in enum.values)


def main() -> None:
    present, recorded = lines_of(), FILE.read_text().splitlines() if FILE.exists() else []
    if lost := broken(recorded, present):
        raise SystemExit("breaking changes of the public API:\n" + "\n".join(lost))
    FILE.write_text("".join(f"{line}\n" for line in present))


if __name__ == "__main__":
    main()
