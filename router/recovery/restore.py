"""Requests that this router doesn't run, as if it had: out of the store, with all that is written of them.

StoredRequest  payload --validate--> ValidRequest --.
               journal -----------------------------+--> Course, which a reader can't tell from one that ran here
               finished, error, usage, receipt -----'
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime

from decant.protos import inference_pb2 as pb
from decant.protos.state_pb2 import RequestRecord
from decant.router.api.validation import validate
from decant.router.execution.stored import RestoreRequest
from decant.router.execution.valid_request import ValidRequest
from decant.router.text.prompt import ContextLengthOf
from decant.router.text.served_model import Models
from decant.runtime.channel import Deadline
from decant.state.owned import StoredRequest

_NO_LIMIT = 1 << 30
"""Tokens of a window that nobody has to serve any more."""


def make_request_restorer(models: Models, max_context_length: ContextLengthOf) -> RestoreRequest:
    async def restore(found: StoredRequest) -> ValidRequest:
        asked = pb.GenerateRequest()
        asked.CopyFrom(found.payload)
        asked.model = found.record.model  # no name meant the default of its time and tenant
        asked.sampling.seed = found.record.seed
        window = (lambda _: _NO_LIMIT) if found.ended else max_context_length
        valid = await validate(asked, models, window, _deadline(found.record), found.key.tenant)
        return replace(valid, key=found.key, payload=found.payload, accepted_at=_accepted_at(found.record))

    return restore


def _deadline(record: RequestRecord) -> Deadline:
    if not record.HasField("deadline"):
        return Deadline()
    return Deadline.after((record.deadline.ToDatetime(UTC) - datetime.now(UTC)).total_seconds())


def _accepted_at(record: RequestRecord) -> float:
    """By the event loop's clock, as far as two routers' wall clocks agree."""
    age = (datetime.now(UTC) - record.create_time.ToDatetime(UTC)).total_seconds()
    return asyncio.get_running_loop().time() - max(0.0, age)
