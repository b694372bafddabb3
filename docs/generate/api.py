from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto

from decant.router.api.validation import UNIMPLEMENTED_FIELDS
from decant.router.limits import limits
from decant.router.settings import RouterSettings
from decant.state.keys import Ttls
from docs.generate import proto_comments as proto
from docs.generate.markdown import code, head, page, table
from docs.generate.proto_comments import Comment, CommentedFile, FilePath

EXAMPLES = Path(__file__).parents[1] / "examples" / "python"
INTRO = """\
One gRPC service, served by every router. [Clients](clients.md) shows how to call it from Python and other languages,
and [errors](errors.md) lists every error and what to do. It is defined in
[protos/inference.proto](../../protos/inference.proto)."""
UNIMPLEMENTED = "A request that sets one of these fields is refused with `FIELD_NOT_SUPPORTED`:"
LEFT_OUT = {"ErrorReason"}


class Element(NamedTuple):
    descriptor: DescriptorProto | EnumDescriptorProto
    path: FilePath


def render() -> str:
    file = CommentedFile()
    parts = [head("API", "the comments of protos/inference.proto"), INTRO, "## Rules", _prose(_rules(file))]
    parts += _methods(file)
    for element in _elements(file):
        comment = file.of(*element.path)
        if comment.section:
            parts.append(f"## {comment.section.capitalize()}")
        if element.descriptor.name not in LEFT_OUT:
            parts += _element(file, element, comment)
        elif comment.section:
            parts.append("[Reasons of errors](errors.md#reasons).")
    if UNIMPLEMENTED_FIELDS:
        parts += ["## Not implemented", UNIMPLEMENTED, "\n".join(f"- `{field}`" for field in UNIMPLEMENTED_FIELDS)]
    return page(parts)


@cache
def defaults_of_limits() -> dict[str, str]:
    fields = RouterSettings.model_fields
    message = limits(
        max_queued_requests=fields["queue_limit"].default,
        resume_grace_ms=fields["resume_grace_ms"].default,
        result_ttl_ms=round(Ttls().ended_s * 1000),
    )
    return {field.name: str(value) for field, value in message.ListFields()}


def _rules(file: CommentedFile) -> str:
    return textwrap.dedent(file.rules.partition("Rules for the whole file:")[2].strip("\n"))


def _methods(file: CommentedFile) -> list[str]:
    (service,) = file.file.service
    rows = []
    for index, method in enumerate(service.method):
        answer = ("stream of " if method.server_streaming else "") + _link(_name(method.output_type))
        signature = f"{_link(_name(method.input_type))} → {answer}"
        text = _cell(file.of(proto.SERVICES, 0, proto.METHODS, index).text)
        rows.append((code(method.name), signature, f"{text} Example: {_example(method.name)}.".strip()))
    columns = (code(service.name), "request → response", "")
    return ["## Methods", _prose(file.of(proto.SERVICES, 0).text), table(columns, rows)]


def _example(method: str) -> str:
    """A link to the example whose first line names the method first."""
    named = {path: re.findall(r"\w+", path.read_text().splitlines()[0].partition(":")[0]) for path in _examples()}
    found = next(path for path, names in named.items() if method in names)
    best = next((path for path in named if path.stem == re.sub(r"(?<!^)(?=[A-Z])", "_", method).lower()), found)
    return f"[{best.name}](../examples/python/{best.name})"


def _examples() -> list[Path]:
    return sorted(EXAMPLES.glob("*.py"))


def _elements(file: CommentedFile) -> Iterator[Element]:
    top = [Element(message, (proto.MESSAGES, index)) for index, message in enumerate(file.file.message_type)]
    top += [Element(enum, (proto.ENUMS, index)) for index, enum in enumerate(file.file.enum_type)]
    spans = {tuple(location.path): location.span[0] for location in file.file.source_code_info.location}
    for element in sorted(top, key=lambda element: spans[element.path]):
        yield element
        if isinstance(element.descriptor, DescriptorProto):
            yield from _nested(element.descriptor, element.path)


def _nested(message: DescriptorProto, path: FilePath) -> Iterator[Element]:
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield Element(nested, (*path, proto.NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield Element(enum, (*path, proto.NESTED_ENUMS, index))


def _element(file: CommentedFile, element: Element, comment: Comment) -> list[str]:
    descriptor, path = element
    parts = [f"### {descriptor.name}", _prose(comment.text)]
    if isinstance(descriptor, EnumDescriptorProto):
        values = enumerate(descriptor.value)
        rows = [(code(value.name), _cell(file.of(*path, proto.VALUES, index).text)) for index, value in values]
        return [*parts, table((code(descriptor.name), ""), rows)]
    if not descriptor.field:
        return [*parts, f"{code(descriptor.name)} has no fields."]
    defaults = defaults_of_limits() if descriptor.name == "Limits" else None
    fields = []
    for index, field in enumerate(descriptor.field):
        text = _cell(file.of(*path, proto.FIELDS, index).text)
        row = [code(field.name), _type(descriptor, field), text]
        if defaults is not None:
            row.insert(2, defaults[field.name])
        fields.append(row)
    columns = (code(descriptor.name), "type", *(["default"] if defaults is not None else []), "")
    return [*parts, table(columns, fields)]


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entry = next((nested for nested in message.nested_type if nested.name == _name(field.type_name)), None)
    if entry is not None and entry.options.map_entry:
        key, value = entry.field
        return code(f"map<{_scalar(key)}, {_scalar(value)}>")
    if field.type_name.startswith(".decant."):
        return ("repeated " if field.label == field.LABEL_REPEATED else "") + _link(_name(field.type_name))
    return code(("repeated " if field.label == field.LABEL_REPEATED else "") + _scalar(field))


def _scalar(field: FieldDescriptorProto) -> str:
    return _name(field.type_name) or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _name(type_name: str) -> str:
    return type_name.rpartition(".")[2]


def _link(name: str) -> str:
    return f"[`{name}`](#{name.lower()})"


def _cell(text: str) -> str:
    return " ".join(text.split())


def _prose(text: str) -> str:
    parts, block = [], False
    for line in text.splitlines():
        if line.startswith("    ") != block and (block or line.strip()):
            parts.append("```" if block else "\n```")
            block = not block
        parts.append(line.removeprefix("    ") if block else line)
    return "\n".join([*parts, *(["```"] if block else [])])
