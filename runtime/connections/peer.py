from __future__ import annotations

import os
import secrets
import socket

from decant.protos import worker_pb2 as wire
from decant.runtime.protocol import PROTOCOL
from decant.runtime.telemetry import logs

_log = logs.get(__name__)


class UnknownMessages:
    """Counter of ignored messages of an unknown kind. One that must not be ignored needs a new PROTOCOL."""

    def __init__(self, peer: str) -> None:
        self.count = 0
        self._peer = peer

    def ignore(self) -> None:
        self.count += 1
        if self.count == 1:
            _log.warning("messages of an unknown kind are ignored", peer=self._peer)


def new_peer(id: str) -> wire.Peer:
    return wire.Peer(id=id, incarnation=secrets.randbits(64) or 1, protocol=PROTOCOL)


def default_id(role: str) -> str:
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def same_incarnation(one: wire.Peer, other: wire.Peer) -> bool:
    return one.id == other.id and one.incarnation == other.incarnation
