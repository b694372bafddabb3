from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import ResponseWriter
from decant.router.request.stored import RequestSnapshot, finish_to_record
from decant.router.request.token_stream import RecordedStream, TokenStream
from decant.router.request.usage import receipt_of, usage_of
from decant.router.text.served_model import ServedModel
from decant.runtime.error_details import to_status
from decant.runtime.errors import ServiceError


def generation(snapshot: RequestSnapshot, model: ServedModel) -> pb.Generation:
    stream, record = snapshot.stream, snapshot.record
    message = pb.Generation(
        request_id=stream.request.key.id,
        state=snapshot.state,
        last_seq=stream.num_tokens,
        result=_result(stream, model),
        create_time=record.create_time,
        transitions=record.transitions,
    )
    if snapshot.expires_in_s is not None:
        message.expire_time.FromDatetime(datetime.now(UTC) + timedelta(seconds=snapshot.expires_in_s))
    if isinstance(stream.end, ServiceError):
        message.error.CopyFrom(to_status(stream.end.detail))
    return message


def _result(stream: TokenStream, model: ServedModel) -> pb.GenerateResponse:
    """The result so far; it stays readable, however the request ended."""
    end = stream.end
    result = ResponseWriter(stream, model).response_so_far()
    recorded = stream.record if isinstance(stream, RecordedStream) else None
    result.usage.CopyFrom(usage_of(stream) if recorded is None else recorded.usage)
    if end is None:
        return result
    now = asyncio.get_running_loop().time()
    result.receipt.CopyFrom(receipt_of(stream, now) if recorded is None else recorded.receipt)
    reason = finish_to_record(end)[1]
    for output in result.outputs:
        if reason is not None and not output.HasField("finished"):
            output.finished.CopyFrom(pb.Finished(index=output.index, finish_reason=reason))
    return result
