"""Parser of stored requests; invalid data of one affects it alone."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from decant.protos.inference_pb2 import FinishReason, GenerateRequest, Generation
from decant.protos.state_pb2 import RequestRecord
from decant.state import journal
from decant.state.client import Reply
from decant.state.errors import UnreadableRequest
from decant.state.ids import Incarnation, RequestKey
from decant.state.logprobs import Logprobs
from decant.state.owned import LogprobsOptions, StoredRequest

_NUMBER_LIMIT = 1 << 31


def parse(key: RequestKey, snapshot: list[Reply]) -> StoredRequest:
    try:
        stored = _parse(key, snapshot)
        _check(stored)
    except (DecodeError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadableRequest(key, str(error)) from error
    return stored


def _parse(key: RequestKey, snapshot: list[Reply]) -> StoredRequest:
    epoch, attempt, state, owner, stream_epoch, record, packed_payload, ttl_ms, length, packed, *more = snapshot
    payload = GenerateRequest.FromString(packed_payload)
    entries = journal.unpack(packed)
    options = LogprobsOptions.of(payload)
    prompt_logprobs, output_logprobs = more or (b"", b"")
    if len(output_logprobs) != length * options.entry_bytes:
        raise ValueError(f"logprobs are missing for some of its {length} tokens")
    logprobs = output_logprobs[(length - len(entries)) * options.entry_bytes :]
    return StoredRequest(
        key=key,
        epoch=epoch,
        attempt=attempt,
        state=state,
        owner=Incarnation.parse(owner.decode()),
        stream_epoch=stream_epoch,
        record=RequestRecord.FromString(record),
        payload=payload,
        entries=entries,
        length=length,
        expires_in_s=ttl_ms / 1000,
        logprobs=Logprobs(options.output or 0, logprobs),
        prompt_logprobs=Logprobs(options.prompt or 0, prompt_logprobs),
    )


def _check(stored: StoredRequest) -> None:
    if stored.state not in Generation.State.values() or stored.state == Generation.STATE_UNSPECIFIED:
        raise ValueError(f"state: one of {Generation.State.keys()}, got {stored.state}")
    for name, number in (("epoch", stored.epoch), ("attempt", stored.attempt)):
        if not 1 <= number < _NUMBER_LIMIT:
            raise ValueError(f"{name}: from 1, below {_NUMBER_LIMIT}, got {number}")
    stored.record.create_time.ToDatetime()
    stored.record.deadline.ToDatetime()
    for finished in stored.record.finished:
        FinishReason.Name(finished.finish_reason)
