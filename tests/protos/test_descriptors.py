from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

from decant.protos import inference_pb2, router_admin_pb2, state_pb2, worker_pb2

FILES = pytest.mark.parametrize(
    "file",
    [inference_pb2.DESCRIPTOR, worker_pb2.DESCRIPTOR, router_admin_pb2.DESCRIPTOR],
    ids=["inference", "worker", "router_admin"],
)
UNTYPED = {
    "google.protobuf.Any",
    "google.protobuf.Struct",
    "google.protobuf.Value",
    "google.protobuf.ListValue",
}
TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


def messages(file: FileDescriptor) -> Iterator[Descriptor]:
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting.extend(message.nested_types)
        yield message


def enums(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in messages(file):
        yield from message.enum_types


def upper_snake(name: str) -> str:
    return "".join(f"_{c}" if c.isupper() else c for c in name).lstrip("_").upper()


@FILES
def test_no_field_holds_just_anything(file: FileDescriptor) -> None:
    fields = [field for message in messages(file) for field in message.fields]
    assert fields
    untyped = [f.full_name for f in fields if f.message_type and f.message_type.full_name in UNTYPED]
    assert untyped == []


@FILES
def test_no_map_is_a_bag_of_texts(file: FileDescriptor) -> None:
    entries = [message for message in messages(file) if message.GetOptions().map_entry]
    bags = [e.full_name for e in entries if all(field.type in TEXT for field in e.fields)]
    assert bags == []


@FILES
def test_every_enum_has_an_unspecified_zero(file: FileDescriptor) -> None:
    for enum in enums(file):
        assert enum.values_by_number[0].name == f"{upper_snake(enum.name)}_UNSPECIFIED"


@FILES
def test_every_message_is_used(file: FileDescriptor) -> None:
    used = {"decant.v1.ResumePoint"}
    for service in file.services_by_name.values():
        for method in service.methods:
            used |= {method.input_type.full_name, method.output_type.full_name}
    for message in (*messages(file), *messages(state_pb2.DESCRIPTOR)):
        used |= {field.message_type.full_name for field in message.fields if field.message_type}
    assert [m.full_name for m in messages(file) if m.full_name not in used] == []


def test_the_services_are_those_that_the_design_names() -> None:
    public = inference_pb2.DESCRIPTOR.services_by_name
    assert {name: {method.name for method in service.methods} for name, service in public.items()} == {
        "InferenceService": {
            "Generate",
            "GenerateStream",
            "Score",
            "Embed",
            "ResumeStream",
            "GetGeneration",
            "CancelGeneration",
            "Tokenize",
            "Detokenize",
            "ListModels",
            "GetModel",
            "GetServerInfo",
        }
    }
    internal = {**worker_pb2.DESCRIPTOR.services_by_name, **router_admin_pb2.DESCRIPTOR.services_by_name}
    assert {name: {method.name for method in service.methods} for name, service in internal.items()} == {
        "Prefill": {"Prefill"},
        "Decode": {"Session"},
        "KvSource": {"Fetch", "Release"},
        "Admin": {"Audit", "Drain", "Undrain", "SetRole", "AddAdapter", "RemoveAdapter"},
        "RouterAdmin": {"ListRequests"},
    }


def java_accessors(field: FieldDescriptor) -> Iterator[str]:
    """What follows `get` in the names of the methods that protoc generates for a field in Java."""
    name = "".join(part.capitalize() for part in field.name.split("_"))
    suffixes = ["", *(["Bytes"] if field.type == FieldDescriptor.TYPE_STRING else [])]
    suffixes += ["Value"] if field.enum_type else []
    if field.is_repeated:
        suffixes += ["List", "Count", "Map", "ValueList"]
    elif field.message_type:
        suffixes += ["Builder", "OrBuilder"]
    for suffix in suffixes:
        yield name + suffix


@FILES
def test_no_two_fields_have_the_same_accessor_in_java(file: FileDescriptor) -> None:
    for message in messages(file):
        names = [name for field in message.fields for name in java_accessors(field)]
        names += ["".join(part.capitalize() for part in oneof.name.split("_")) + "Case" for oneof in message.oneofs]
        assert {name for name in names if names.count(name) > 1} == set(), message.full_name


def test_unset_and_zero_are_two_things() -> None:
    for message in (
        inference_pb2.SamplingParams,
        inference_pb2.StoppingParams,
        inference_pb2.ResponseOptions,
    ):
        for field in message.DESCRIPTOR.fields:
            assert field.is_repeated or field.has_presence, field.full_name
