"""One life of one process, as it names itself to others."""

from __future__ import annotations

import os
import secrets
import socket

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

from decant.protos import worker_pb2 as wire
from decant.runtime import logs

PROTOCOL = 2
"""Version of the rules of protos/worker.proto that this build speaks."""


_log = logs.get(__name__)


class UnknownMessages:
    """Messages of one peer that this build has no field for: a newer one may send them in a rolling upgrade.

    They are ignored on both sides. A message that has to be understood needs another PROTOCOL.
    """

    def __init__(self, peer: str) -> None:
        self.count = 0
        self._peer = peer

    def ignore(self) -> None:
        """Count one; the first is logged."""
        self.count += 1
        if self.count == 1:
            _log.warning("messages of an unknown kind are ignored", peer=self._peer)


def new_peer(id: str) -> wire.Peer:
    """A process's own name: ``id`` and an incarnation drawn now, so that a restarted one is another peer."""
    return wire.Peer(id=id, incarnation=secrets.randbits(64) or 1, protocol=PROTOCOL)


def default_id(role: str) -> str:
    """``role``, this host and this process: what a process is called unless it is given a name."""
    return f"{role}-{socket.gethostname()}-{os.getpid()}"


def speaks(protocol: int) -> bool:
    """Whether a peer of that version is understood: ours and the one before."""
    return protocol in (PROTOCOL, PROTOCOL - 1) and protocol > 0


def enum_name(enum: EnumTypeWrapper, value: int) -> str:
    """Its name; the number of a value that only a newer build knows."""
    found = enum.DESCRIPTOR.values_by_number.get(value)
    return str(value) if found is None else found.name


def same_life(one: wire.Peer, other: wire.Peer) -> bool:
    """Whether two messages name the same life of the same process."""
    return one.id == other.id and one.incarnation == other.incarnation
