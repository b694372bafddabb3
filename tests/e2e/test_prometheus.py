"""A real Prometheus scrapes a deployment: rules load, and what the dashboard and the autoscalers ask returns data."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from decant.protos import inference_pb2 as pb
from tests.build.test_monitoring import EXPRESSIONS, MONITORING, RULES
from tests.e2e.deployment import PATIENCE_S, Deployment, deployment
from tests.e2e.test_metrics_of_a_run import NEEDS_TROUBLE
from tests.ports import reserved_port
from tests.prometheus import program

pytestmark = pytest.mark.slow

QUERIES = [one for one in EXPRESSIONS if one not in {rule["expr"] for rule in RULES}]


class Prometheus:
    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/{path}?{query}", timeout=PATIENCE_S) as response:
            return json.load(response)["data"]

    def series(self, expression: str) -> list[Any]:
        found: list[Any] = self.get("query", query=expression)["result"]
        return found


@contextmanager
def prometheus(running: Deployment, folder: Path) -> Iterator[Prometheus]:
    processes = {"router": running.routers[0]}
    processes |= {f"worker-{index}": worker.process for index, worker in enumerate(running.workers)}
    targets = [
        {
            "targets": [f"127.0.0.1:{process.until('serving')['admin_port']}"],
            "labels": {"namespace": "decant", "pod": name},
        }
        for name, process in processes.items()
    ]
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(MONITORING / "alerts.yaml")],
        "scrape_configs": [{"job_name": "decant", "static_configs": targets}],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = [program("prometheus"), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder}"]
    with reserved_port() as port:
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            yield Prometheus(port)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def until_all(prometheus: Prometheus, running: Deployment, queries: list[str]) -> None:
    """Ask for answers until each query returns a series."""
    ends, left = time.monotonic() + PATIENCE_S, queries
    while left:
        assert time.monotonic() < ends, left
        with running.stub() as stub:
            request = pb.GenerateRequest(prompt="def total(values):\n" * 8, stopping=pb.StoppingParams(max_tokens=24))
            stub.Generate(request, timeout=PATIENCE_S)
        try:
            left = [one for one in left if not prometheus.series(one)]
        except OSError:
            assert time.monotonic() < ends, "Prometheus does not answer"
        time.sleep(0.5)


def test_rules_load_and_queries_return_data_of_a_running_deployment(tmp_path: Path) -> None:
    program("prometheus")
    queries = [one.replace("$__rate_interval", "1m").replace("$model", ".*") for one in QUERIES]
    queries = [one for one in queries if not any(name in one for name in NEEDS_TROUBLE)]
    assert len(queries) > 30
    with deployment() as running, prometheus(running, tmp_path) as real:
        until_all(real, running, queries)
        (group,) = real.get("rules")["groups"]
        assert {rule["name"]: (rule["health"], rule.get("lastError", "")) for rule in group["rules"]} == {
            rule["alert"]: ("ok", "") for rule in RULES
        }
        assert not [rule for rule in group["rules"] if rule["state"] == "firing"]
