"""The gateway smg in front of the routers: OpenAI's and Anthropic's APIs over HTTP.

    python -m decant.command.up.openai_gateway --host HOST --port PORT --drain-seconds S --routers ADDRESS,...

smg runs in this process, which writes the log lines of a process of `decant up`: `serving`, then `readiness`. SIGTERM
drains it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence

from decant.runtime.serving.server_settings import is_every_address, join_address
from decant.runtime.telemetry import logs
from decant.runtime.telemetry.logs import LogSettings

POLL_S = 0.1
"""Between two looks at the gateway, which has no event for the end of its start."""
ANSWER_S = 10.0
DISCOVERY_S = 5
"""Seconds between two health checks of a router by the gateway."""

_log = logs.get("openai")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(sys.argv[1:] if arguments is None else arguments)
    logs.start("openai", LogSettings(log_format="json"))
    from smg.launch_router import parse_router_args
    from smg.router import Router

    port = options.port or _free_port(options.host)
    key = secrets.token_urlsafe(32)
    settings = parse_router_args(smg_arguments(options, port, key))
    reached_at = "127.0.0.1" if is_every_address(options.host) else options.host
    threading.Thread(target=_report, args=(reached_at, port, key), daemon=True).start()
    Router.from_args(settings).start()
    return 0


def smg_arguments(options: argparse.Namespace, port: int, key: str) -> list[str]:
    """Arguments of smg. ``key`` closes its control plane, by which anyone could register other workers."""
    return [
        *("--host", options.host, "--port", str(port)),
        *("--backend", "vllm", "--worker-urls", *(f"grpc://{address}" for address in options.routers.split(","))),
        # Routers are equal, and place requests by their prefixes themselves.
        *("--policy", "round_robin", "--health-check-interval-secs", str(DISCOVERY_S)),
        *("--control-plane-api-keys", f"up:up:admin:{key}"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(_free_port("127.0.0.1"))),
        *("--shutdown-grace-period-secs", str(round(options.drain_seconds))),
        *("--log-level", "error", "--log-json"),
    ]


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="decant.command.up.openai_gateway")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--drain-seconds", type=float, required=True)
    parser.add_argument("--routers", required=True)
    return parser.parse_args(arguments)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        port: int = probe.getsockname()[1]
        return port


def _report(host: str, port: int, key: str) -> None:
    while not _has_tokenizer(host, port, key):
        time.sleep(POLL_S)
    _log.info("serving", address=join_address(host, port))
    _log.info("readiness", state="ready")


def _has_tokenizer(host: str, port: int, key: str) -> bool:
    """Whether the gateway has a model with its tokenizer, and so can answer."""
    connection = http.client.HTTPConnection(host, port, timeout=ANSWER_S)
    try:
        connection.request("GET", "/v1/tokenizers", headers={"Authorization": f"Bearer {key}"})
        answer = connection.getresponse()
        return answer.status == 200 and bool(json.loads(answer.read()).get("tokenizers"))
    except (OSError, http.client.HTTPException, ValueError):
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    raise SystemExit(main())
