from __future__ import annotations

from ipaddress import ip_address

import grpc
from pydantic import Field, model_validator

from decant.runtime.connections.tls import ServerTls, server_credentials
from decant.runtime.grpc_options import KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES, MIN_PING_MS, PORT
from decant.runtime.settings import SettingError

MAX_PENDING_CALLS = 1_000_000
MAX_PENDING_SECONDS = 86_400
_NO_LIMIT = 2**31 - 1  # milliseconds


class ServerSettings(ServerTls):
    host: str = Field(
        default="127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 or :: is every address"
    )
    port: int = Field(default=PORT, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="plaintext HTTP port for /alive, /ready, /metrics and, for the same machine, a router's /requests; "
        "unset: none",
    )
    admin_host: str | None = Field(
        default=None, min_length=1, description="address of the admin port; unset: that of --host"
    )
    gateway_metrics: bool = Field(
        default=False, description="serve metrics also under vLLM's names, which inference gateways read"
    )
    reuse_port: bool = Field(default=False, description="share the port with other processes (SO_REUSEPORT)")
    max_message_bytes: int = Field(
        default=MAX_MESSAGE_BYTES, ge=1024, lt=2**31, description="maximum size of a message, in each direction"
    )
    admin_name: str | None = Field(
        default=None,
        min_length=1,
        description="name in the certificates of administrators, who then may call the administrative service alone, "
        "and are alone in that; unset: a worker serves it to every peer, a router has none",
    )
    drain_seconds: float = Field(default=45.0, ge=0, description="seconds after SIGTERM for running calls to end")

    @model_validator(mode="after")
    def _authenticated_administrators(self) -> ServerSettings:
        if self.admin_name is not None and self.tls_client_ca is None:
            raise SettingError("admin_name", "needs tls_client_ca", self.admin_name)
        return self

    @property
    def max_connection_age_s(self) -> float | None:
        """Age at which a connection takes no more calls; its running calls end on it. None: no limit."""
        return None


def bind(server: grpc.aio.Server, settings: ServerSettings) -> int:
    address = join_address(settings.host, settings.port)
    credentials = server_credentials(settings)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:  # without any detail from gRPC
        raise SettingError("port", "an address that can be listened on", address) from None


def server_options(settings: ServerSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.so_reuseport", int(settings.reuse_port)),
        # Clients may ping every 10 s, also during a long prefill; by default gRPC ends such connections (GOAWAY,
        # too_many_pings). Half of that, since an early ping counts against its sender. gRPC ignores unknown names: a
        # test looks up each one in its library.
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # A call that is not handled yet waits until its own deadline: by default gRPC drops those beyond 1,000 and
        # those older than 30 s as CANCELLED without a reason. The process refuses them with one.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        ("grpc.server_max_unrequested_time_in_server", MAX_PENDING_SECONDS),
        # Detects a client that vanished.
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        *_connection_age(settings.max_connection_age_s),
    ]


def _connection_age(seconds: float | None) -> list[tuple[str, int]]:
    """Options of a limit, which gRPC varies by a tenth. Its grace has none: a stream ends by its own deadline."""
    if seconds is None:
        return []
    return [("grpc.max_connection_age_ms", round(seconds * 1000)), ("grpc.max_connection_age_grace_ms", _NO_LIMIT)]


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is loopback; False for names other than localhost, which may be any address."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_every_address(host: str) -> bool:
    """Whether a server with this host listens on every address; False for names."""
    try:
        return ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
