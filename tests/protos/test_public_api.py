from __future__ import annotations

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from decant.protos import inference_pb2
from tests.protos.public_api import FILE, broken, lines_of

RECORDED = FILE.read_text().splitlines()
ADD = "run `python -m tests.protos.public_api` to add what is new"


def test_the_public_api_keeps_all_that_clients_rely_on() -> None:
    assert broken(RECORDED, lines_of()) == [], "a breaking change needs another package"


def test_new_parts_of_the_public_api_are_recorded() -> None:
    assert sorted(set(lines_of()) - set(RECORDED)) == [], ADD
    assert sorted(RECORDED) == RECORDED


def changed(change: str) -> list[str]:
    """Lines of the API after a change of its descriptor."""
    file = descriptor_pb2.FileDescriptorProto()
    inference_pb2.DESCRIPTOR.CopyToProto(file)
    message = next(one for one in file.message_type if one.name == "GenerateRequest")
    field = next(one for one in message.field if one.name == "priority")
    match change:
        case "number":
            field.number = 99
        case "type":
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_INT64
        case "name":
            field.name = field.json_name = "urgency"
        case "label":
            field.label = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
        case "removed":
            message.field.remove(field)
        case "oneof":
            field.oneof_index = 0
        case "method":
            del file.service[0].method[0]
        case "streaming":
            file.service[0].method[0].server_streaming = True
        case "value":
            file.enum_type[0].value[1].number = 77
        case "added":
            message.field.add(name="more", number=500, type=field.type, label=field.label)
    pool = descriptor_pool.DescriptorPool()
    for needed in inference_pb2.DESCRIPTOR.dependencies:
        _add(pool, needed)
    pool.Add(file)
    return lines_of(pool.FindFileByName(file.name))


def _add(pool: descriptor_pool.DescriptorPool, file: object) -> None:
    for needed in file.dependencies:  # type: ignore[attr-defined]
        _add(pool, needed)
    copy = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(copy)  # type: ignore[attr-defined]
    pool.Add(copy)


@pytest.mark.parametrize(
    "change", ["number", "type", "name", "label", "removed", "oneof", "method", "streaming", "value"]
)
def test_a_breaking_change_is_noticed(change: str) -> None:
    assert broken(RECORDED, changed(change))


def test_an_added_field_breaks_nothing() -> None:
    assert broken(RECORDED, changed("added")) == []
