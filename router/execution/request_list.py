from __future__ import annotations

import json
from collections.abc import Collection
from itertools import islice
from typing import Any

from google.protobuf.json_format import MessageToDict

from decant.protos import router_admin_pb2 as wire
from decant.protos.inference_pb2 import Generation
from decant.router.execution.execution import Execution
from decant.runtime.enum_names import enum_label

MAX_LISTED = 200
"""The oldest come first."""


def list_requests(executions: Collection[Execution], now: float) -> wire.ListRequestsResponse:
    """List requests without their texts; ``executions`` are in the order of acceptance."""
    listed = [_describe(execution, now) for execution in islice(executions, MAX_LISTED)]
    return wire.ListRequestsResponse(total=len(executions), requests=listed)


def requests_page(listed: wire.ListRequestsResponse) -> bytes:
    """Page /requests of the admin port, as JSON."""
    return json.dumps({"total": listed.total, "requests": [document(one) for one in listed.requests]}).encode()


def document(one: wire.OpenRequest) -> dict[str, Any]:
    """Values for JSON, all of them also where they are zero."""
    values = MessageToDict(one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {**values, "state": enum_label(Generation.State, one.state)}


def _describe(execution: Execution, now: float) -> wire.OpenRequest:
    stream, owned = execution.stream, execution.owned
    return wire.OpenRequest(
        id=owned.key.id,
        tenant=owned.key.tenant,
        model=stream.request.engine_request.model,
        state=owned.state,
        age_s=round(max(0.0, now - stream.request.accepted_at), 3),
        prompt_tokens=stream.request.prompt_tokens,
        output_tokens=stream.num_tokens,
        attempt=owned.attempt,
        prefill_worker=stream.trace.prefill_worker,
        decode_worker=stream.trace.decode_worker,
    )
