from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from decant.command.app import app
from decant.command.deployment import processes
from decant.command.deployment.processes import LOST, Process
from decant.command.top import command as top
from decant.command.top.figures import RouterFigures, Snapshot, WorkerFigures, model_figures
from decant.command.top.pages import Reader, Target
from decant.command.top.samples import WINDOW_S, Distribution, History, Sample, Window
from decant.command.top.screen import render
from decant.runtime.serving.admin import AdminServer
from decant.runtime.serving.health import Readiness
from decant.runtime.telemetry.metrics import EngineMetrics, ProcessMetrics, Registry, RequestMetrics

LATENCY = "decant_time_to_first_token_seconds"
NOW = 1_000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "time", SimpleNamespace(time=lambda: NOW))


def sample(at: float, *lines: str) -> Sample:
    return Sample.parse(at, "\n".join([*lines, ""]))


def histogram(model: str, sum: float, **counts: float) -> list[str]:
    bounds = dict(zip(("0.1", "0.5", "+Inf"), counts.values(), strict=True))
    lines = [f'{LATENCY}_bucket{{model="{model}",le="{bound}"}} {count}' for bound, count in bounds.items()]
    return [*lines, f'{LATENCY}_count{{model="{model}"}} {bounds["+Inf"]}', f'{LATENCY}_sum{{model="{model}"}} {sum}']


# Samples


def test_a_rate_is_the_difference_of_two_samples_by_their_time() -> None:
    first = sample(10.0, 'c_total{model="a",source="x"} 5', 'c_total{model="b",source="x"} 1')
    last = sample(
        14.0, 'c_total{model="a",source="x"} 25', 'c_total{model="b",source="x"} 2', 'c_total{model="a",source="y"} 3'
    )
    window = Window(first, last)
    assert window.rate("c_total") == (20 + 1 + 3) / 4
    assert window.rate("c_total", model="a") == (20 + 3) / 4  # a series that began meanwhile counts from 0
    assert window.rate("c_total", model="a", source="x") == 5
    assert window.rate("other_total") == 0
    assert Window(first, first).rate("c_total") == 0


def test_quantiles_are_interpolated_within_the_bucket_of_the_new_observations() -> None:
    # Between the samples: 8 observations up to 0.1, 2 more up to 0.5, none above; 0.9 s in all.
    first = sample(0.0, *histogram("a", 100.0, low=70, middle=70, all=90))
    last = sample(60.0, *histogram("a", 100.9, low=78, middle=80, all=100))
    seen = Window(first, last).distribution(LATENCY, model="a")
    assert seen.count == 10
    assert seen.mean == pytest.approx(0.09)
    assert seen.quantile(0.5) == pytest.approx(0.1 * 5 / 8)
    assert seen.quantile(0.9) == pytest.approx(0.1 + 0.4 * 1 / 2)
    assert Window(first, first).distribution(LATENCY).quantile(0.5) is None


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert Distribution(2, 9.0, {0.1: 0, 0.5: 0, float("inf"): 2}).quantile(0.99) == 0.5


def test_observations_of_two_routers_are_merged() -> None:
    def window(low: int, all: int) -> Window:
        before = sample(0.0, *histogram("a", 0.0, low=0, middle=0, all=0), 'decant_requests_running{model="a"} 0')
        after = sample(2.0, *histogram("a", 1.0, low=low, middle=all, all=all), 'decant_requests_running{model="a"} 3')
        return Window(before, after)

    (model,) = model_figures([window(3, 3), window(0, 1)])
    assert (model.model, model.running) == ("a", 6)
    assert model.ttft.mean == pytest.approx(2.0 / 4)
    assert model.ttft.p50 == pytest.approx(0.1 * 2 / 3)
    assert model.ttft.p99 == pytest.approx(0.1 + 0.4 * 0.96)
    assert model.itl.p50 is None


def test_a_history_keeps_the_last_minute() -> None:
    assert History().window is None
    history = History()
    for at in range(0, 200, 10):
        history.add(sample(float(at), f"c_total {at}"))
    assert history.window is not None
    assert history.window.seconds == WINDOW_S
    assert history.window.rate("c_total") == 1


def test_a_restarted_process_begins_a_new_history() -> None:
    history = History()
    for at, count, start in ((0, 500, 1), (1, 510, 1), (2, 3, 7), (3, 5, 7)):
        history.add(sample(at, f"c_total {count}", f"process_start_time_seconds {start}"))
    assert history.window is not None
    assert history.window.rate("c_total") == 2


# Pages of real admin ports


@asynccontextmanager
async def admin(registry: Registry) -> AsyncIterator[str]:
    readiness = Readiness()
    readiness.mark_ready()
    server = AdminServer(readiness, registry)
    try:
        yield f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    finally:
        await server.close()


def worker_registry() -> tuple[Registry, EngineMetrics]:
    registry = Registry()
    ProcessMetrics(registry)
    metrics = EngineMetrics(registry, ())
    metrics.info.labels("m", "decode").set(1)
    return registry, metrics


def router_registry(page: dict[str, object]) -> tuple[Registry, RequestMetrics]:
    registry = Registry()
    ProcessMetrics(registry)
    metrics = RequestMetrics(registry)
    metrics.queues.running.labels("m").set(1)
    metrics.store_available.set(1)
    registry.pages["/requests"] = lambda: json.dumps(page).encode()
    return registry, metrics


REQUEST = {
    "id": "r-1", "tenant": "default", "model": "m", "state": "decoding", "age_s": 2.5, "prompt_tokens": 12,
    "output_tokens": 3, "attempt": 1, "prefill_worker": "prefill-1", "decode_worker": "decode-1",
}  # fmt: skip


async def read_pair() -> Snapshot:
    worker, engine = worker_registry()
    router, requests = router_registry({"total": 1, "requests": [REQUEST]})
    async with admin(worker) as at_worker, admin(router) as at_router:
        dead = Process(1, LOST, lost_at=NOW - 3)
        targets = [Target("decode-1", at_worker), Target("prefill-1", None, dead), Target("router-1", at_router)]
        reader = Reader()
        await reader.read(targets)
        engine.cache_usage.set(0.5)
        engine.generated.inc(40)
        requests.of("m").generated.inc(40)
        requests.of("m").ttft.observe(0.03)
        requests.of("m").count_request("stop")
        return await reader.read(targets, "a title")


async def test_a_router_elsewhere_shows_its_figures_without_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decant.runtime.serving.admin.is_loopback", lambda host: False)
    snapshot = await read_pair()
    assert (snapshot.requests, snapshot.requests_in_flight) == ([], 1)
    assert isinstance(snapshot.processes[-1].figures, RouterFigures)
    assert [model.model for model in snapshot.models] == ["m"]


async def test_figures_come_from_the_admin_ports_and_a_dead_process_is_shown_as_such() -> None:
    snapshot = await read_pair()
    decode, prefill, router = snapshot.processes
    assert isinstance(decode.figures, WorkerFigures)
    assert (decode.role, decode.state, decode.figures.model) == ("decode", "ready", "m")
    assert (decode.figures.kv_usage, decode.figures.output_tokens_total) == (0.5, 40)
    assert decode.figures.output_tokens_per_s == pytest.approx(40 / decode.figures.window_s)
    assert (prefill.role, prefill.state, prefill.figures) == ("prefill", "lost 3 s ago", None)
    assert isinstance(router.figures, RouterFigures)
    assert router.figures.is_store_available
    (model,) = snapshot.models
    assert model.requests_total == 1
    assert model.ttft.mean == pytest.approx(0.03)
    assert model.ttft.p50 is not None
    assert 0.02 < model.ttft.p50 <= 0.04
    assert (snapshot.requests_in_flight, snapshot.requests[0]["id"], snapshot.requests[0]["router"]) == (
        1,
        "r-1",
        "router-1",
    )
    assert json.loads(json.dumps(top.document(snapshot)))["models"][0]["ttft"]["mean"] == pytest.approx(0.03)


async def test_a_process_that_stops_answering_loses_its_figures() -> None:
    reader = Reader()
    async with admin(worker_registry()[0]) as address:
        (before,) = (await reader.read([Target("w", address)])).processes
    (after,) = (await reader.read([Target("w", address)])).processes
    assert before.figures is not None
    assert (after.role, after.state, after.figures) == ("decode", "no answer: Connection refused", None)


@pytest.mark.parametrize("width", [80, 140])
async def test_the_screen_fits_and_shows_every_process(width: int) -> None:
    snapshot = await read_pair()
    many = replace(snapshot, requests=[REQUEST] * 90, requests_in_flight=90)
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(render(many, width, 40))
    lines = console.export_text().splitlines()
    assert len(lines) == 40
    assert max(len(line.rstrip()) for line in lines) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for part in ("decode-1", "lost 3 s ago", "router-1", "50%", "30 ms", "requests in flight: 90", "r-1"):
        assert part in text
    assert re.search(r"and \d+ more", text)


async def test_names_that_others_choose_are_shown_literally() -> None:
    snapshot = await read_pair()
    ids = ["[/x]", "[bold]b", "a\x1b[31mb\nc"]
    decode = replace(snapshot.processes[0], name="[fe80::1]:9090")
    console = Console(file=io.StringIO(), width=140, record=True)
    requests = [{**REQUEST, "id": id} for id in ids]
    console.print(render(replace(snapshot, requests=requests, processes=[decode]), 140, None))
    text = console.export_text()
    for shown in ("[fe80::1]:9090", "[/x]", "[bold]b", "a�[31mb�c"):
        assert shown in text
    assert "\x1b" not in text


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no deployment runs on this machine: start one with `decant up`, or give addresses of admin ports"),
        (["nowhere"], "ADDRESS: host:port of an admin port, got nowhere"),
        (["h:70000"], "ADDRESS: host:port of an admin port, got h:70000"),
        (["127.0.0.1:1"], "127.0.0.1:1: Connection refused"),
    ],
)
def test_what_can_not_be_shown_is_named(
    arguments: list[str], message: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    done = CliRunner().invoke(app, ["top", *arguments])
    assert done.exit_code in (1, 2)
    assert done.stderr == f"decant: {message}\n"
