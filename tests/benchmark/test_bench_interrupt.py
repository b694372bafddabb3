from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from decant.bench import benchmark
from decant.bench.records import Record
from decant.command.app import app
from decant.protos import inference_pb2 as pb

SWEEP = ("--address", "127.0.0.1:1", "--rate", "2", "--sweep", "--slo", "ttft=1s", "--requests", "4", "--warm-up", "0")


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored in background jobs
    yield
    signal.signal(signal.SIGINT, before)


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str, finished: int) -> Result:
    """Run `decant bench`, with Ctrl-C in the run after `finished` ones."""
    runs: list[int] = []

    @contextlib.asynccontextmanager
    async def client(_: object) -> AsyncIterator[Any]:
        async def model(_: str) -> pb.Model:
            return pb.Model(id="m", vocab_size=100)

        yield SimpleNamespace(model=model)

    async def send(requests: Sequence[object], _: Sequence[float]) -> list[Record]:
        runs.append(len(requests))
        if len(runs) > finished:
            signal.raise_signal(signal.SIGINT)
            await asyncio.Event().wait()
        return [Record(n, n, tokens=[n + 0.1, n + 0.2]) for n in range(len(requests))]

    monkeypatch.setattr(benchmark, "_client", client)
    monkeypatch.setattr(benchmark, "Load", lambda *_: SimpleNamespace(open=send))
    return CliRunner().invoke(app, ["bench", *SWEEP, *arguments])


def test_ctrl_c_in_a_sweep_reports_its_finished_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = bench(monkeypatch, "--json", "--html", str(html), finished=2)
    assert done.exit_code == 130
    document = json.loads(done.stdout)
    assert [(run["request_rate"], run["completed"]) for run in document["runs"]] == [(2.0, 4), (4.0, 8)]
    assert document["sentence"] == "keeps TTFT p99 under 1000 ms at 4 requests/s"
    assert document["sentence"] in html.read_text()
    assert done.stderr == "decant: interrupted; finished runs in the report: 2\n"


def test_ctrl_c_in_the_first_run_of_a_sweep_reports_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = bench(monkeypatch, "--html", str(html), finished=0)
    assert (done.exit_code, done.output, html.exists()) == (130, "", False)
