"""Free ports."""

from __future__ import annotations

import socket

LAST = 55_000  # a cluster's bus takes the port 10,000 above


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port < LAST:
            return port
