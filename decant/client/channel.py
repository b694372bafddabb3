from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The servers' default."""

# If a name resolves to several routers, each call goes to the next that is ready. Only `decant.client.retry` retries.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},
}

_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Detects a dead connection while nothing is sent. Not more often than servers allow.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect to a restarted router while its requests can be resumed.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # despite its name, the limit for establishing a connection
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How to verify a server, and this client's certificate for mutual TLS.

    ca           PEM file of the server's roots; None: gRPC's own
    certificate  PEM chain of this client, with ``key``; None: none
    name         name in the server's certificate, if it differs from the address
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("Tls: certificate and key come together")

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def credentials_of(token: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call. The ValueError for an invalid token does not show it."""
    if token is None:
        return ()
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError("token: printable ASCII without spaces, at least 1 character")
    return (("authorization", f"Bearer {token}"),)


def open_blocking(address: str, tls: Tls | None) -> grpc.Channel:
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), _options(tls))


def open_async(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, _OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), _options(tls))


def _options(tls: Tls) -> tuple[tuple[str, str | int], ...]:
    return _OPTIONS if tls.name is None else (*_OPTIONS, ("grpc.ssl_target_name_override", tls.name))


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
