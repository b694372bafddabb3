"""The way to a router, or to several behind one name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""As servers have it by default."""

# A name that stands for several routers: each call goes to the next of those that are ready. A call that was refused
# before it was taken up (a router that drains, a connection that broke) is made again; a server that says when, is
# obeyed.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},
    "methodConfig": [
        {
            "name": [{"service": "decant.v1.InferenceService"}],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
}

_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A connection that vanished without a word is noticed while a long prompt is read and nothing is sent. Not more
    # often than the servers allow.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How a server is recognised, and how this client proves itself where servers ask for it (mutual TLS).

    ca           PEM file of the roots that the server's certificate chains to; None: gRPC's own
    certificate  PEM chain of this client, with ``key``; None: none
    name         name expected in the server's certificate, where it is reached by another
    """

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("Tls: certificate and key come together")

    def credentials(self) -> grpc.ChannelCredentials:
        """Raises OSError for a file that can't be read."""
        return grpc.ssl_channel_credentials(_read(self.ca), _read(self.key), _read(self.certificate))


def open_blocking(address: str, tls: Tls | None) -> grpc.Channel:
    """Raises OSError for a TLS file that can't be read."""
    if tls is None:
        return grpc.insecure_channel(address, _OPTIONS)
    return grpc.secure_channel(address, tls.credentials(), _options(tls))


def open_async(address: str, tls: Tls | None) -> grpc.aio.Channel:
    """Raises OSError for a TLS file that can't be read."""
    if tls is None:
        return grpc.aio.insecure_channel(address, _OPTIONS)
    return grpc.aio.secure_channel(address, tls.credentials(), _options(tls))


def _options(tls: Tls) -> tuple[tuple[str, str | int], ...]:
    return _OPTIONS if tls.name is None else (*_OPTIONS, ("grpc.ssl_target_name_override", tls.name))


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
