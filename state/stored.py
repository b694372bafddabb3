"""What Redis holds of a request, read and checked: a record that can't be read concerns its own request alone."""

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
"""Epochs and attempts are below this."""


def parse(key: RequestKey, snapshot: list[Reply]) -> StoredRequest:
    """A snapshot as lua/common.lua makes it. Raises UnreadableRequest for anything that no owner writes."""
    try:
        found = _parsed(key, snapshot)
        _check(found)
    except (DecodeError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise UnreadableRequest(key, str(error)) from error
    return found


def _parsed(key: RequestKey, snapshot: list[Reply]) -> StoredRequest:
    epoch, attempt, state, owner, stream_epoch, record, packed_payload, ttl_ms, length, packed, *more = snapshot
    payload = GenerateRequest.FromString(packed_payload)
    entries = journal.unpack(packed)
    asked = LogprobsOptions.of(payload)
    prompt_logprobs, output_logprobs = more or (b"", b"")
    if len(output_logprobs) != length * asked.entry_bytes:
        raise ValueError(f"logprobs are lacking for some of its {length} tokens")
    shown = output_logprobs[(length - len(entries)) * asked.entry_bytes :]
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
        logprobs=Logprobs(asked.output or 0, shown),
        prompt_logprobs=Logprobs(asked.prompt or 0, prompt_logprobs),
    )


def _check(found: StoredRequest) -> None:
    """Raises ValueError, and what protobuf raises for a time that is none."""
    if found.state not in Generation.State.values() or found.state == Generation.STATE_UNSPECIFIED:
        raise ValueError(f"state: one of {Generation.State.keys()}, got {found.state}")
    for name, number in (("epoch", found.epoch), ("attempt", found.attempt)):
        if not 1 <= number < _NUMBER_LIMIT:
            raise ValueError(f"{name}: from 1, below {_NUMBER_LIMIT}, got {number}")
    found.record.create_time.ToDatetime()
    found.record.deadline.ToDatetime()
    for finished in found.record.finished:
        FinishReason.Name(finished.finish_reason)
