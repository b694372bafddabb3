from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from decant.runtime.grpc_options import CHANNEL_OPTIONS, KEEPALIVE_TIMEOUT_MS, NAME_OVERRIDE

# If a name resolves to several routers, each call goes to the next that is ready. Only `decant.client.retry` retries.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},
}

_OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
)

_RESOLVE_MS = 5_000
"""Least milliseconds between two resolutions of a name, which every lost connection asks for, also one that a router
ends at its age. By default 30 s, in which a router at a new address is not found.
"""

PROXY = "grpc_proxy"
"""Environment variable of an HTTP proxy to routers. `http_proxy` and `https_proxy` are for web pages: with them alone,
gRPC would send calls to loopback and to a cluster through the proxy.
"""


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
        return grpc.insecure_channel(address, _options())
    return grpc.secure_channel(address, tls.credentials(), _options(tls))


def open_async(address: str, tls: Tls | None) -> grpc.aio.Channel:
    if tls is None:
        return grpc.aio.insecure_channel(address, _options())
    return grpc.aio.secure_channel(address, tls.credentials(), _options(tls))


def _options(tls: Tls | None = None) -> tuple[tuple[str, str | int], ...]:
    proxy = ("grpc.enable_http_proxy", int(bool(os.environ.get(PROXY))))
    name = ((NAME_OVERRIDE, tls.name),) if tls is not None and tls.name is not None else ()
    return (*_OPTIONS, ("grpc.dns_min_time_between_resolutions_ms", _RESOLVE_MS), proxy, *name)


def _read(path: str | Path | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()
