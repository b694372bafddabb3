from __future__ import annotations

import json
from collections.abc import Collection
from itertools import islice
from typing import Any

from decant.protos.inference_pb2 import Generation
from decant.router.execution.execution import Execution
from decant.runtime.enum_names import enum_label

MAX_LISTED = 200
"""The oldest come first."""


def requests_page(executions: Collection[Execution], now: float) -> bytes:
    """Page /requests of the admin port as JSON, without texts; ``executions`` in the order of acceptance."""
    listed = [_describe(execution, now) for execution in islice(executions, MAX_LISTED)]
    return json.dumps({"total": len(executions), "requests": listed}).encode()


def _describe(execution: Execution, now: float) -> dict[str, Any]:
    stream, owned = execution.stream, execution.owned
    return {
        "id": owned.key.id,
        "tenant": owned.key.tenant,
        "model": stream.request.engine_request.model,
        "state": enum_label(Generation.State, owned.state),
        "age_s": round(max(0.0, now - stream.request.accepted_at), 3),
        "prompt_tokens": stream.request.prompt_tokens,
        "output_tokens": stream.num_tokens,
        "attempt": owned.attempt,
        "prefill_worker": stream.trace.prefill_worker,
        "decode_worker": stream.trace.decode_worker,
    }
