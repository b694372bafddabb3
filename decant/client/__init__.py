"""The client, blocking and asyncio: calls and streams to several routers, typed errors, retries, resumption.

Users import its names from `decant`.
"""

from decant.client.async_client import AsyncClient
from decant.client.channel import Tls
from decant.client.client import Client
from decant.client.options import Options, Prompt
from decant.client.results import (
    Answer,
    CancelStatus,
    Delta,
    Finished,
    FinishReason,
    Generation,
    GenerationState,
    Output,
    Receipt,
    ToolCall,
    ToolCallDelta,
    Transition,
    Usage,
    Waiting,
)
from decant.client.streams import AsyncStream, Stream
from decant.runtime.error_details import Reason
from decant.runtime.errors import (
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
    "ToolCall",
    "ToolCallDelta",
    "Transition",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Usage",
    "Waiting",
]
