from __future__ import annotations

import copy
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from decant.protos import inference_pb2 as pb
from decant.router.api.response_writer import ResponseWriter
from decant.router.api.usage import RecordedMeter
from decant.router.request.stored import RequestSnapshot, finish_to_record
from decant.router.request.token_stream import TokenStream
from decant.router.text.served_model import ServedModel
from decant.runtime.error_details import to_status
from decant.runtime.errors import Cancelled, ServiceError


async def generation(snapshot: RequestSnapshot, model: ServedModel) -> pb.Generation:
    stream, record = snapshot.stream, snapshot.record
    message = pb.Generation(
        request_id=stream.request.key.id,
        state=snapshot.state,
        last_seq=len(stream.tokens),
        result=await _result(stream, model),
        create_time=record.create_time,
        transitions=record.transitions,
    )
    if snapshot.expires_in_s is not None:
        message.expire_time.FromDatetime(datetime.now(UTC) + timedelta(seconds=snapshot.expires_in_s))
    if isinstance(stream.end, ServiceError):
        message.error.CopyFrom(to_status(stream.end.detail))
    return message


async def _result(stream: TokenStream, model: ServedModel) -> pb.GenerateResponse:
    so_far = copy.copy(stream)
    so_far.tokens = list(stream.tokens)
    so_far.end = Cancelled() if stream.end is None else stream.end
    seed = stream.request.engine_request.sampling.seed
    result = pb.GenerateResponse(request_id=stream.request.key.id, model=model.id, seed=seed)
    output = result.outputs.add()

    async def join(message: pb.GenerateStreamResponse) -> None:
        output.text += message.delta.text
        output.token_ids.extend(message.delta.token_ids)
        output.logprobs.extend(message.delta.logprobs)
        result.prompt_logprobs.extend(message.started.prompt_logprobs)

    meter = RecordedMeter(so_far)
    with suppress(ServiceError):  # the result stays readable, however the request ended
        await ResponseWriter(so_far, model).stream(join, meter)
    result.usage.CopyFrom(meter.usage())
    if stream.end is not None:
        result.receipt.CopyFrom(meter.receipt())
        finished = finish_to_record(stream.end)[1]
        if finished is not None:
            output.finished.CopyFrom(finished)
    return result
