from __future__ import annotations

from typing import NamedTuple
from urllib.parse import quote, unquote

from decant.protos import worker_pb2
from decant.protos.inference_pb2 import Generation

State = Generation.State  # stored as numbers; a later state has a greater one
ENDED = frozenset({Generation.STATE_SUCCEEDED, Generation.STATE_FAILED, Generation.STATE_CANCELLED})

_FOLLOWS = {
    Generation.STATE_QUEUED: {Generation.STATE_PREFILLING, Generation.STATE_DECODING},
    Generation.STATE_PREFILLING: {Generation.STATE_HANDING_OFF},
    Generation.STATE_HANDING_OFF: {Generation.STATE_DECODING},
}


def is_valid_transition(new: State, old: State, *, new_attempt: bool) -> bool:
    if old in ENDED:
        return False
    if new_attempt:
        return new == Generation.STATE_QUEUED
    return new in ENDED or new in _FOLLOWS.get(old, ())


class RequestKey(NamedTuple):
    tenant: str
    id: str

    def __str__(self) -> str:
        return f"{quote(self.tenant, safe='')}/{quote(self.id, safe='')}"

    @classmethod
    def parse(cls, text: str) -> RequestKey:
        tenant, _, id_ = text.partition("/")
        return cls(unquote(tenant), unquote(id_))


class Incarnation(NamedTuple):
    id: str
    incarnation: int  # 64 bits, drawn when the process starts

    def __str__(self) -> str:
        """Put the digits first, as an id may contain a slash."""
        return f"{self.hex}/{self.id}"

    @property
    def hex(self) -> str:
        return f"{self.incarnation:016x}"

    @classmethod
    def parse(cls, text: str) -> Incarnation:
        incarnation, _, id_ = text.partition("/")
        return cls(id_, int(incarnation, 16))

    @classmethod
    def of(cls, peer: worker_pb2.Peer) -> Incarnation:
        return cls(peer.id, peer.incarnation)
