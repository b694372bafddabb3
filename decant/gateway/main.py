from __future__ import annotations

import socket
import ssl
import sys
from collections.abc import Sequence

from decant.client import AsyncClient
from decant.gateway.app import Gateway, Limits
from decant.gateway.server import listen, serve
from decant.gateway.settings import GatewaySettings
from decant.runtime.serving import shutdown
from decant.runtime.settings import SettingError, flag_name
from decant.runtime.settings_sources import load_or_exit
from decant.runtime.telemetry import logs

PROGRAM = "decant gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a gateway; return 0 after a graceful end, 1 if requests were ended, 2 for unusable settings."""
    settings = load_or_exit(GatewaySettings, sys.argv[1:] if arguments is None else arguments, program=PROGRAM)
    logs.start("gateway", settings)
    try:
        with listen(settings) as listening:
            return 0 if shutdown.run(_serve(settings, listening)) else 1
    except SettingError as error:
        return _refuse(f"{flag_name(error.field)}: {error.limit}, got {error.value}")
    except ssl.SSLError as error:
        return _refuse(f"--https-certificate: a PEM chain and its key, got {error}")
    except OSError as error:
        return _refuse(f"{error.filename}: {error.strerror}")


def _refuse(error: object) -> int:
    print(f"{PROGRAM}: {error}", file=sys.stderr)
    return 2


async def _serve(settings: GatewaySettings, listening: socket.socket) -> bool:
    try:
        client = AsyncClient(settings.address, tls=settings.tls)
    except ValueError as error:
        limit = str(error).partition(": ")[2].rpartition(", got ")[0]
        raise SettingError("address", limit, settings.address) from None
    limits = Limits(settings.timeout, settings.max_requests, settings.max_body_bytes)
    async with client:
        return await serve(Gateway(client, limits), settings, listening)
