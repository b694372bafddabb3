from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

import grpc

from decant.runtime.connections.tls import PeerTls, channel_files
from decant.runtime.errors import DeadlineExceeded
from decant.runtime.grpc_options import CHANNEL_OPTIONS, NAME_OVERRIDE, NO_PROXY

PEER_OPTIONS: tuple[tuple[str, int], ...] = (
    *CHANNEL_OPTIONS,
    # Pings only keep NAT entries alive; heartbeats detect a lost peer.
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 0),  # the owner of a request retries
    *NO_PROXY,
    # Channels share no connections, so a broken one affects one peer.
    ("grpc.use_local_subchannel_pool", 1),
)


_MAX_UINT32 = 2**32 - 1


class Connector:
    """Opener of channels with the newest valid TLS files. The constructor raises SettingError."""

    def __init__(self, tls: PeerTls) -> None:
        self._name = tls.peer_name
        self._files = channel_files(tls)

    def generation(self) -> int:
        """Reload changed TLS files and return the number of reloads; an open channel keeps its files."""
        self._files.reload()
        return self._files.generation

    def open(self, target: str) -> grpc.aio.Channel:
        """Open a channel, which the caller closes."""
        self._files.reload()
        options: list[tuple[str, str | int]] = list(PEER_OPTIONS)
        credentials = self._files.loaded
        if credentials is None:
            return grpc.aio.insecure_channel(target, options)
        if self._name is not None:
            options.append((NAME_OVERRIDE, self._name))
        return grpc.aio.secure_channel(target, credentials, options)


def open_channel(target: str, tls: PeerTls) -> grpc.aio.Channel:
    """Open a channel, which the caller closes. Raises SettingError for unusable TLS files."""
    return Connector(tls).open(target)


def whole_ms(seconds: float) -> int:
    """Whole milliseconds as a message's uint32 holds them: from 0, and at most 49 days."""
    return int(min(max(0.0, seconds * 1000), _MAX_UINT32))


class HasTime(Protocol):
    def time_remaining(self) -> float | None: ...


def remaining(context: HasTime) -> float | None:
    """Return the seconds left; None without a deadline.

    gRPC rounds a sent timeout up by a few percent; messages carry exact deadlines.
    """
    left = context.time_remaining()
    return None if left is None else max(0.0, left)


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time on this process's monotonic clock, or none."""

    at: float | None = None

    @classmethod
    def after(cls, seconds: float | None) -> Deadline:
        return cls(None if seconds is None else time.monotonic() + seconds)

    @classmethod
    def of(cls, context: HasTime) -> Deadline:
        return cls.after(remaining(context))

    def remaining(self) -> float | None:
        return None if self.at is None else max(0.0, self.at - time.monotonic())

    def remaining_ms(self) -> int | None:
        left = self.remaining()
        return None if left is None else whole_ms(left)

    @property
    def has_passed(self) -> bool:
        return self.remaining() == 0.0

    def check(self) -> None:
        if self.has_passed:
            raise DeadlineExceeded
