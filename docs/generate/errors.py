from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import grpc
from google.protobuf.descriptor_pb2 import EnumDescriptorProto
from google.rpc import error_details_pb2

import decant
from decant.client.retry import is_retryable
from decant.runtime import errors
from decant.runtime.error_details import ErrorDetail, Reason
from docs.generate import proto_comments as proto
from docs.generate.markdown import code, head, page, table
from docs.generate.proto_comments import CommentedFile

EXAMPLE = Path(__file__).parents[1] / "examples" / "python" / "errors.py"
PREFIX = "ERROR_REASON_"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
STATUSES = {code.name: code for code in grpc.StatusCode}
DETAILS = (*error_details_pb2.DESCRIPTOR.message_types_by_name, "ResumePoint")
INTRO = """\
An error is the gRPC status of the call. Its details (`grpc-status-details-bin`) are `google.rpc` messages: always
`ErrorInfo` with the domain `decant` and a reason from this page, and those named beside the status.

- **Call again** means: the same call, with the same request id, after the delay of `RetryInfo`. The trailer
  `grpc-retry-pushback-ms` has the same delay. Nothing runs twice.
- **Resume** means: `ResumeStream` with the `seq` of the last message that arrived.
- The Python client does both, and raises an [exception](#exceptions-in-python) when it gives up."""
FORM = """\
`BadRequest` names the field by its path in the request (`sampling.temperature`), an unimplemented one as the server
lists it (`SamplingParams.n`). Field, limit and value are also in `ErrorInfo.metadata`, under these names; so are those
of a quota, whose `QuotaFailure` names the tenant."""
OTHERS = """\
A status without `ErrorInfo` comes from gRPC or another server:

| status | cause | what to do |
| --- | --- | --- |
| `UNAVAILABLE` | the connection broke | resume, or call again with the same id |
| `DEADLINE_EXCEEDED`, `CANCELLED` | the client itself gave up | fetch what was generated |
| `RESOURCE_EXHAUSTED` | a message is larger than `--max-message-bytes` or the client's limit | raise the limit |
| `UNIMPLEMENTED` | another service listens at this address | check the address |"""
EXCEPTIONS = """\
Every exception is a `decant.ServiceError` with `code`, `reason`, `retryable`, `retry_after` and `resume`; errors of a
field also have `field`, `limit` and `value`. From [examples/python/errors.py](../examples/python/errors.py):

```python
{example}
```"""


def render() -> str:
    file = CommentedFile()
    enum, index = next((enum, i) for i, enum in enumerate(file.file.enum_type) if enum.name == "ErrorReason")
    parts = [head("Errors", "protos/inference.proto and runtime/errors.py"), INTRO, "## Reasons"]
    columns = (code("ErrorReason"), "status", "again?", "what happened, what to do")
    parts += [table(columns, _reasons(file, enum, (proto.ENUMS, index))), FORM]
    parts += ["## Errors without a reason", OTHERS, "## Exceptions in Python", EXCEPTIONS.format(example=_example())]
    return page([*parts, table(("exception", "status"), _exceptions())])


def _reasons(file: CommentedFile, enum: EnumDescriptorProto, path: tuple[int, ...]) -> Iterator[tuple[str, ...]]:
    for position, value in enumerate(enum.value):
        comment = file.of(*path, proto.VALUES, position)
        name = value.name.removeprefix(PREFIX)
        again = [_again(_error(name, status)) for status in _named(comment.beside, STATUSES)]
        yield code(name), _marked(comment.beside), ", then ".join(again), " ".join(comment.above.split())


def _named(text: str, names: Iterable[str]) -> list[str]:
    return [word for word in re.findall(r"\w+", text) if word in names]


def _marked(text: str) -> str:
    return re.sub(
        r"\w+", lambda match: code(match[0]) if match[0] in STATUSES or match[0] in DETAILS else match[0], text
    )


def _example() -> str:
    match = re.search(r"^    (try:\n.*?)(?=\n\n)", EXAMPLE.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None
    return textwrap.dedent("    " + match[1])


def _exceptions() -> Iterator[tuple[str, str]]:
    details = [ErrorDetail(status.value[0], "", Reason.UNSPECIFIED) for status in grpc.StatusCode]
    details += [ErrorDetail(EXHAUSTED.value[0], "", reason) for reason in (Reason.QUOTA_EXCEEDED, Reason.QUEUE_FULL)]
    for detail in details:
        error = errors.from_detail(detail)
        name = type(error).__name__
        if type(error) is not errors.ServiceError and hasattr(decant, name):
            reason = "" if error.code is not EXHAUSTED else f", reason {code(detail.reason.value)}"
            yield code(f"decant.{name}"), code(error.code.name) + reason


def _error(name: str, status: str) -> errors.ServiceError:
    return errors.from_detail(ErrorDetail(STATUSES[status].value[0], "", Reason(name)))


def _again(error: errors.ServiceError) -> str:
    if not is_retryable(error):
        return "no retry"
    return "resume" if error.code is grpc.StatusCode.ABORTED else "call again"
