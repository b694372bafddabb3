from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from decant import AsyncClient
from decant.command.app import app
from decant.command.deployment.deployments import Deployment

NOWHERE = ("--address", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--requests", "5", "batching"), "--requests: after batching"),
        (("--json", "--seed", "1", "interference"), "--json, --seed: after interference"),
        (("--prefill", "2", *NOWHERE), "--prefill: with --up, got 2"),
        (("--burstiness", "2", *NOWHERE), "--burstiness: with --rate, got 2.0"),
        (("--prefixes", "2", *NOWHERE), "--prefixes: with --prefix-tokens, got 2"),
        (("--dataset", "x.jsonl", "--output-tokens", "9", *NOWHERE), "--output-tokens: without --dataset, got 9"),
        (("--workload", "anyscale", "--prompt-tokens", "9", *NOWHERE), "--prompt-tokens: without --workload anyscale"),
        (("--timeout", "inf", *NOWHERE), "--timeout: 1e-09 to 1e+09, got inf"),
        (("--rate", "nan", *NOWHERE), "--rate: 1e-09 to 1e+09, got nan"),
        (("--rate", "1e308", *NOWHERE), "--rate: 1e-09 to 1e+09, got 1e+308"),
        (("--rate", "1", "--burstiness", "1e-300", *NOWHERE), "--burstiness: 1e-09 to 1e+09, got 1e-300"),
        (("--address", "host:99999"), "address: host:port with a port from 1 to 65535"),
        (("--address", ""), "address: 'host:port'"),
        (("--ca", "/nowhere.pem", *NOWHERE), "/nowhere.pem"),
        (("--key", "/nowhere.pem", *NOWHERE), "--certificate and --key come together"),
        (("--up", "--ca", "/nowhere.pem"), "--up, --ca: one of them, got both"),
        (("--html", "/nowhere/report.html", *NOWHERE), "--html: a file in a folder that exists"),
        (("--html", "/tmp", *NOWHERE), "--html: a file in a folder that exists, got /tmp"),
        (("batching", "--html", "/nowhere/report.html"), "--html: a file in a folder that exists"),
        (("interference", "--html", "/nowhere/report.html"), "--html: a file in a folder that exists"),
    ],
)
def test_an_option_without_effect_is_refused_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1


def test_a_deployment_that_is_starting_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    starting = Deployment(7, (), "unix:///r", has_started=False)
    monkeypatch.setattr("decant.command.deployment.deployments.running", lambda: [starting])
    done = CliRunner().invoke(app, ["bench"])
    assert done.exit_code == 1
    assert done.output == "decant: `decant up` (process 7) is starting: measure it once it is ready\n"


def test_a_deployment_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decant.bench.benchmark.AsyncClient", partial(AsyncClient, resume_seconds=0))
    done = CliRunner().invoke(app, ["bench", *NOWHERE, "--html", str(tmp_path / "report.html")])
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert not list(tmp_path.iterdir())
