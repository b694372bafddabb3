from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from decant.protos import inference_pb2 as pb
from decant.protos.state_pb2 import RequestRecord
from decant.router.api.validation import validate
from decant.router.request.stored import RestoreRequest
from decant.router.request.valid_request import ValidRequest
from decant.router.text.prompt import ContextLengthOf
from decant.router.text.served_model import Models
from decant.runtime.connections.channel import Deadline
from decant.state.owned import StoredRequest

_NO_LIMIT = 1 << 30


def make_request_restorer(models: Models, max_context_length: ContextLengthOf) -> RestoreRequest:
    async def restore(stored: StoredRequest) -> ValidRequest:
        request = pb.GenerateRequest()
        request.CopyFrom(stored.payload)
        request.model = stored.record.model  # an empty name meant the tenant's default of that time
        request.sampling.seed = stored.record.seed
        context_length = (lambda _: _NO_LIMIT) if stored.ended else max_context_length
        created = stored.record.create_time.ToDatetime(UTC).timestamp()
        valid = await validate(request, models, context_length, _deadline(stored.record), stored.key.tenant, created)
        valid.engine_request.adapter = stored.record.adapter  # its name may stand for another one now
        valid.engine_request.traceparent = stored.record.traceparent
        return replace(valid, key=stored.key, payload=stored.payload, accepted_at=_accepted_at(stored.record))

    return restore


def _deadline(record: RequestRecord) -> Deadline:
    if not record.HasField("deadline"):
        return Deadline()
    return Deadline.after((record.deadline.ToDatetime(UTC) - datetime.now(UTC)).total_seconds())


def _accepted_at(record: RequestRecord) -> float:
    age = (datetime.now(UTC) - record.create_time.ToDatetime(UTC)).total_seconds()
    return asyncio.get_running_loop().time() - max(0.0, age)
