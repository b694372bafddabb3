"""A real Envoy with deploy/envoy/envoy.yaml."""

from __future__ import annotations

import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.deployment import PATIENCE_S
from tests.ports import reserved_port

ENVOY_CONFIGS = Path(__file__).parents[2] / "deploy" / "envoy"
_PROGRAM = Path(sysconfig.get_path("scripts"), "envoy")
needs_envoy = pytest.mark.skipif(not _PROGRAM.exists(), reason="its wheel is for Linux on x86-64")


@contextmanager
def envoy(
    routers: Sequence[str],
    manager: Mapping[str, Any] | None = None,
    tls: Mapping[str, Any] | None = None,
    ca: Path | None = None,
) -> Iterator[str]:
    """Run Envoy with the file of the repository, these routers and changes; yield its address when it is ready."""
    config: Any = yaml.safe_load((ENVOY_CONFIGS / "envoy.yaml").read_text())
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    (chain,) = listener["filter_chains"]
    chain["filters"][0]["typed_config"] |= manager or {}
    chain |= (tls or {}).get("listener", {})
    cluster |= (tls or {}).get("cluster", {})
    cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [{"endpoint": _endpoint(router)} for router in routers]
    with reserved_port() as port, tempfile.TemporaryDirectory() as folder:
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        file = Path(folder, "envoy.yaml")
        file.write_text(yaml.safe_dump(config))
        command: list[str | Path] = [
            _PROGRAM,
            "-c",
            file,
            "--concurrency",
            "1",
            "--disable-hot-restart",
            "--log-level",
            "error",
        ]
        command += ["--file-flush-interval-msec", "100"]
        with subprocess.Popen(command) as process:
            try:
                _wait_until_ready(f"127.0.0.1:{port}", ca)
                yield f"127.0.0.1:{port}"
            finally:
                process.terminate()
                process.wait(PATIENCE_S)


def _endpoint(address: str) -> Mapping[str, Any]:
    host, _, port = address.rpartition(":")
    return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}


def _wait_until_ready(address: str, ca: Path | None) -> None:
    ends = time.monotonic() + PATIENCE_S
    request = health_pb2.HealthCheckRequest(service="ready")
    credentials = None if ca is None else grpc.ssl_channel_credentials(ca.read_bytes())
    opened = grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
    with opened as channel:
        while True:
            try:
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
                return
            except grpc.RpcError:
                assert time.monotonic() < ends, "Envoy is not ready"
                time.sleep(0.1)
