"""What users import and type: the client, and the `decant` command.

    >>> from decant import Client
    >>> with Client("localhost:50051") as client:
    ...     with client.stream("def add(a, b):", max_tokens=40) as stream:
    ...         for delta in stream:
    ...             print(delta.text, end="", flush=True)
    ...     print(f" ({stream.usage.completion_tokens} tokens, first after {stream.receipt.ttft_ms} ms)")
    return a + b (4 tokens, first after 5.0 ms)

`Client` blocks, `AsyncClient` awaits; they have the same methods, options and results. Importing this package loads
grpcio and protobuf and nothing else of others'.
"""

from decant.aio import AsyncClient
from decant.channel import Tls
from decant.client import Client
from decant.options import Options, Prompt
from decant.results import (
    Answer,
    CancelStatus,
    Delta,
    Finished,
    FinishReason,
    Generation,
    GenerationState,
    Output,
    Receipt,
    Transition,
    Usage,
)
from decant.streams import AsyncStream, Stream
from runtime.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    ServiceError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from runtime.fault import Reason

__all__ = [
    "Aborted",
    "AlreadyExists",
    "Answer",
    "AsyncClient",
    "AsyncStream",
    "CancelStatus",
    "Cancelled",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "FailedPrecondition",
    "FinishReason",
    "Finished",
    "Generation",
    "GenerationState",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "Options",
    "OutOfRange",
    "Output",
    "PermissionDenied",
    "Prompt",
    "QueueFull",
    "QuotaExceeded",
    "Reason",
    "Receipt",
    "ServiceError",
    "Stream",
    "Tls",
    "Transition",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
]
