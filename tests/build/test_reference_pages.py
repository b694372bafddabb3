from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.rpc import error_details_pb2

import decant
from decant.client.channel import PROXY
from decant.protos import inference_pb2 as pb
from decant.router.api.validation import UNIMPLEMENTED_FIELDS
from decant.router.limits import limits
from decant.router.settings import RouterSettings
from decant.runtime.error_details import Reason
from decant.state.keys import Ttls
from docs.generate.__main__ import PAGES

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
API, ERRORS, CLIENTS = ((REFERENCE / f"{name}.md").read_text() for name in ("api", "errors", "clients"))

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
STATUSES = {code.name for code in grpc.StatusCode}
DETAILS = {*error_details_pb2.DESCRIPTOR.message_types_by_name, "ResumePoint"}
TYPES = {number: name[5:].lower() for name, number in vars(FieldDescriptor).items() if name.startswith("TYPE_")}
PREFIX = "ERROR_REASON_"


def messages() -> Iterator[Descriptor]:
    waiting = list(pb.DESCRIPTOR.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        if not message.GetOptions().map_entry:
            yield message
            waiting.extend(message.nested_types)


def enums() -> Iterator[EnumDescriptor]:
    yield from pb.DESCRIPTOR.enum_types_by_name.values()
    for message in messages():
        yield from message.enum_types


MESSAGES = {message.name: message for message in messages()}
ENUMS = {enum.name: enum for enum in enums()}


def type_of(field: FieldDescriptor) -> str:
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields
        return f"map<{type_of(key)}, {type_of(value)}>"
    named = kind or field.enum_type
    return ("repeated " if field.is_repeated else "") + (named.name if named else TYPES[field.type])


def tables(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in block.splitlines()]
        yield header[0], rows


DEFINED = [(header.strip("`"), rows) for page in (API, ERRORS) for header, rows in tables(page) if header[0] == "`"]
ROWS = dict(DEFINED)


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def plain(cell: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell).replace("`", "")


def column(table: str, number: int) -> list[str]:
    return [plain(cell[number]) for cell in ROWS[table]]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_its_generator_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run `make docs-reference`"


def test_every_table_defines_something_once() -> None:
    known = {*MESSAGES, *ENUMS, SERVICE.name}
    assert len(known) == len(MESSAGES) + len(ENUMS) + 1, "two things have one name: the tables need longer ones"
    assert [name for name, _ in DEFINED if name not in known] == []
    assert len(ROWS) == len(DEFINED)


@pytest.mark.parametrize("message", MESSAGES.values(), ids=list(MESSAGES))
def test_every_field_of_a_message_is_documented(message: Descriptor) -> None:
    if not message.fields:
        assert f"`{message.name}` has no fields." in API
        return
    documented = list(zip(column(message.name, 0), column(message.name, 1), strict=True))
    assert documented == [(field.name, type_of(field)) for field in message.fields]


@pytest.mark.parametrize("enum", ENUMS.values(), ids=list(ENUMS))
def test_every_value_of_an_enum_is_documented(enum: EnumDescriptor) -> None:
    prefix = PREFIX if enum.name == "ErrorReason" else ""
    assert [prefix + name for name in column(enum.name, 0)] == [value.name for value in enum.values]


@pytest.mark.parametrize("name", ROWS)
def test_a_meaning_is_a_sentence_or_left_to_the_name(name: str) -> None:
    meanings = [meaning.partition("Example: ")[0].strip() for meaning in column(name, -1)]
    assert all(meaning.endswith((".", ":", ",")) for meaning in meanings if meaning), meanings


@pytest.mark.parametrize("message", MESSAGES.values(), ids=list(MESSAGES))
def test_every_optional_field_says_what_it_means_when_unset(message: Descriptor) -> None:
    optional = {field.name for field in message.fields if field.has_presence and field.message_type is None}
    optional -= {field.name for oneof in message.oneofs if len(oneof.fields) > 1 for field in oneof.fields}
    meanings = dict(zip(column(message.name, 0), column(message.name, -1), strict=True)) if optional else {}
    assert [name for name in optional if not meanings[name]] == []


def test_every_method_is_documented() -> None:
    assert [[plain(cell) for cell in row[:2]] for row in ROWS[SERVICE.name]] == [
        [method.name, f"{method.input_type.name} → {'stream of ' * method.server_streaming}{method.output_type.name}"]
        for method in SERVICE.methods
    ]


def test_every_method_has_an_example_that_says_so() -> None:
    for method, _, meaning in ROWS[SERVICE.name]:
        linked = re.search(r"Example: \[.+\]\((.+)\)", meaning)
        assert linked, f"{method} has no example"
        first_line = (REFERENCE / linked[1]).read_text().splitlines()[0]
        assert method.strip("`") in re.findall(r"\w+", first_line.partition(":")[0]), linked[1]


def test_every_reason_has_its_statuses_and_details_and_says_whether_to_call_again() -> None:
    proto = (ROOT / "protos" / "inference.proto").read_text()
    comments = dict(re.findall(rf"{PREFIX}(\w+) = [1-9]\d*;  // (.*)", proto))
    assert len(comments) == len(ENUMS["ErrorReason"].values) - 1
    for reason, status, again, meaning in ROWS["ErrorReason"]:
        words = set(re.findall(r"\w+", comments.get(reason.strip("`"), "")))
        assert set(code(status)) == words & (STATUSES | DETAILS), reason
        assert len(again.split(", then ")) == len(words & STATUSES) or not words
        assert set(again.split(", then ")) <= {"no retry", "call again", "resume"} or not words
        assert meaning


def test_limits_are_the_defaults_of_a_router() -> None:
    settings = {name: RouterSettings.model_fields[name].default for name in ("queue_limit", "resume_grace_ms")}
    message = limits(
        max_queued_requests=settings["queue_limit"],
        resume_grace_ms=settings["resume_grace_ms"],
        result_ttl_ms=round(Ttls().ended_s * 1000),
    )
    assert {row[0].strip("`"): row[2] for row in ROWS["Limits"]} == {
        field.name: str(value) for field, value in message.ListFields()
    }


def test_unimplemented_fields_are_those_that_a_server_lists() -> None:
    section = API.partition("## Not implemented")[2]
    assert tuple(re.findall(r"^- `(.+)`$", section, re.MULTILINE)) == UNIMPLEMENTED_FIELDS


@pytest.mark.parametrize("page", [API, ERRORS, CLIENTS], ids=["api", "errors", "clients"])
def test_nothing_is_mentioned_that_does_not_exist(page: str) -> None:
    prose = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    values = {value.name for enum in ENUMS.values() for value in enum.values}
    fields = {field.name for message in MESSAGES.values() for field in message.fields}
    methods = {method.name for method in SERVICE.methods}
    kinds = {**MESSAGES, **error_details_pb2.DESCRIPTOR.message_types_by_name}
    attributes = {name for name in dir(decant.InvalidArgument) if not name.startswith("_")} | {"resume_seconds"}
    attributes |= {"http_proxy", "https_proxy", "no_proxy", PROXY, f"no_{PROXY}"}  # variables of gRPC
    for span in code(prose):
        if match := re.fullmatch(r"([A-Z]\w*)\.(\w+)", span):
            assert match[1] in kinds and match[2] in kinds[match[1]].fields_by_name, span  # noqa: PT018
        elif match := re.fullmatch(r"decant\.([A-Z]\w+)", span):
            assert hasattr(decant, match[1]), span
        elif span.startswith("--"):
            assert span[2:].replace("-", "_") in RouterSettings.model_fields, span
        elif re.fullmatch(r"[A-Z]+(_[A-Z]+)+", span):
            assert span in STATUSES | values | {reason.value for reason in Reason}, span
        elif re.fullmatch(r"[a-z]+(_[a-z]+)+", span):
            assert span in fields | attributes, span
        elif re.fullmatch(r"[A-Z][a-z]+([A-Z][a-z]+)+", span):
            assert span in {*MESSAGES, *ENUMS, *methods, *DETAILS, SERVICE.name}, span


def test_every_example_is_linked() -> None:
    targets = re.findall(r"\]\(\.\./examples/python/([^)]+)\)", API + ERRORS + CLIENTS)
    assert set(targets) == {path.name for path in (DOCS / "examples" / "python").glob("*.py")}


@pytest.mark.parametrize("page", [ERRORS, CLIENTS], ids=["errors", "clients"])
def test_shown_code_is_that_of_the_examples(page: str) -> None:
    shown = re.findall(r"\[(examples/[^\]]+)\]\(\.\./\1\):\n\n```(?:python|javascript)\n(.*?)```", page, re.DOTALL)
    assert len(shown) == len(re.findall(r"^```\w", page, re.MULTILINE)) > 0
    for path, block in shown:
        text = (DOCS / path).read_text()
        assert any(textwrap.indent(block, " " * depth) in text for depth in (0, 2, 4, 8)), f"{path} lacks:\n{block}"
