"""Port and gRPC options that servers, peers and clients share. No dependencies: the client imports it."""

from __future__ import annotations

PORT = 50051
"""Default port of a router."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Default limit of a message, in each direction."""

MIN_PING_MS = 5_000
"""Least milliseconds between pings of a client; more frequent ones count against it."""
KEEPALIVE_MS = 20_000
"""Milliseconds between pings while nothing is sent; well above `MIN_PING_MS`."""
KEEPALIVE_TIMEOUT_MS = 10_000
"""Milliseconds for the answer to a ping; then the connection is dead."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnect to a restarted process at once: a router's requests can be resumed for a short time.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, the limit to establish a connection: a busy host accepts it late.
    ("grpc.min_reconnect_backoff_ms", 5_000),
)

ACCEPTED = "decant-accepted"
"""Key of the initial metadata that a router sends when it has accepted a request."""

NO_PROXY: tuple[tuple[str, int], ...] = (("grpc.enable_http_proxy", 0),)
"""For channels within a deployment."""

NAME_OVERRIDE = "grpc.ssl_target_name_override"
