from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.gpu import __main__ as command
from bench.gpu import continuous_batching, shapes
from bench.gpu.idle import gaps_share
from bench.gpu.interference import Arrivals
from bench.gpu.rows import Bench, Row, measure


@pytest.fixture(autouse=True)
def frozen_again() -> Iterator[None]:
    yield
    gc.freeze()


@pytest.mark.slow
def test_a_tiny_model_is_measured_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr("bench.gpu.ceilings.RUNS", 1)
    assert command.main(["--device", "cpu", "--tiny", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["note"] == "a tiny model: the figures mean nothing"
    assert result["bandwidth_gb_s"] > 0
    assert result["product_tflop_s"] > 0
    rows = {row["name"]: row for row in result["rows"]}
    unmeasured = {name for name, row in rows.items() if row["value"] is None}
    assert all(name.startswith(("device idle", "requests whose", "transformers")) for name in unmeasured), rows
    assert len(result["rows"]) == 17
    assert [load["model"] for load in result["loads"]] == ["tiny"] * 5
    assert all(load["backend"] and load["fused_layers"] for load in result["loads"])
    assert all(row["value"] is None or row["value"] > 0 for row in rows.values())


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, int, bool]]:
    """Parses options on a GPU of a capability; returns what is wrong, skinny rows, and whether launches depend."""
    pytest.importorskip("triton")
    from decant.engine.cuda import dependent_launch, skinny

    monkeypatch.setattr(skinny, "SKINNY_ROWS", 16)
    monkeypatch.setattr(dependent_launch, "ENABLED", True)

    def choose(*options: str, device: str = "cuda", capability: tuple[int, int] = (9, 0)) -> tuple[str, int, bool]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        problem = command.choose_products(command.make_parser().parse_args(options), torch.device(device))
        return problem, skinny.SKINNY_ROWS, dependent_launch.ENABLED

    return choose


def test_options_choose_how_the_engine_multiplies_few_rows(products: Callable[..., tuple[str, int, bool]]) -> None:
    assert products() == ("", 16, True)
    assert products("--skinny-rows", "0") == ("", 0, True)
    assert products("--skinny-rows", "4", "--no-dependent-launch") == ("", 4, False)


@pytest.mark.parametrize(
    ("options", "changes", "problem"),
    [
        (["--skinny-rows", "17"], {}, "--skinny-rows: 0 to 16, got 17"),
        (["--skinny-rows", "-1"], {}, "--skinny-rows: 0 to 16, got -1"),
        (["--skinny-rows", "0"], {"device": "cpu"}, "on a GPU only"),
        (["--no-dependent-launch", "--cuda-kernels", "none"], {}, "of Triton kernels"),
        (["--no-dependent-launch"], {"capability": (8, 9)}, "needs compute capability 9.0, got 8.9"),
    ],
)
def test_options_that_would_change_nothing_are_refused(
    options: list[str], changes: dict[str, Any], problem: str, products: Callable[..., tuple[str, int, bool]]
) -> None:
    actual, rows, is_dependent = products(*options, **changes)
    assert problem in actual
    assert (rows, is_dependent) == (16, True)


class Parts:
    """A benchmark of the given parts."""

    device = torch.device("cpu")
    ends = 0.0

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def parts(self) -> dict[str, Any]:
        return self._parts


def rows_of(parts: Parts, names: list[str], seconds: float = 60) -> list[Row]:
    return list(measure(parts, names, seconds))  # type: ignore[arg-type]


def failing(error: Exception) -> Any:
    return lambda: (_ for _ in ()).throw(error)


def test_a_part_that_fails_or_is_late_is_a_row_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    broken = Parts(decode=failing(RuntimeError("no kernel image")))
    (row,) = rows_of(broken, ["decode"])
    assert row.verdict == "not measured: RuntimeError: no kernel image"
    (row,) = rows_of(broken, ["decode"], -1)
    assert row.verdict == "not measured: -1 s were over"
    assert "not measured" in command.line(row)
    with pytest.raises(SystemExit):
        command.main(["--parts", "decode,other"])
    assert "got other" in capsys.readouterr().err


def test_an_error_of_triton_is_a_row_with_the_reason() -> None:
    errors = pytest.importorskip("triton.runtime.errors")
    broken = Parts(decode=failing(errors.OutOfResources(300_000, 232_448, "shared memory")))
    (row,) = rows_of(broken, ["decode"])
    assert row.verdict.startswith("not measured: OutOfResources: out of resource: shared memory")


def test_the_memory_of_a_part_is_free_when_the_next_begins() -> None:
    """A fused layer and the module that it is the forward of, or an engine and its transfers, are a cycle."""
    held: list[Any] = []

    def first() -> Iterator[Row]:
        model = SimpleNamespace(weights=torch.zeros(3))
        model.forward = lambda: model
        held.append(weakref.ref(model.weights))
        gc.freeze()
        yield Row("first", 1.0, "")

    def second() -> Iterator[Row]:
        yield Row("second", float(held[0]() is None), "")

    gc.disable()
    try:
        rows = rows_of(Parts(first=first, second=second), ["first", "second"])
    finally:
        gc.enable()
    assert [row.value for row in rows] == [1.0, 1.0]


def test_each_row_is_written_before_the_next_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, written = tmp_path / "out.json", []

    def rows(*_: object) -> Iterator[Row]:
        yield Row("first", 1.0, "")
        written.extend(json.loads(out.read_text())["rows"])
        yield Row("second", 2.0, "")

    monkeypatch.setattr("bench.gpu.ceilings.RUNS", 1)
    monkeypatch.setattr(command, "measure", rows)
    command.main(["--device", "cpu", "--tiny", "--json", str(out)])
    assert [row["name"] for row in written] == ["first"]
    assert len(json.loads(out.read_text())["rows"]) == 2


def test_transformers_runs_in_its_own_process_after_the_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.PARTS[-1] == "transformers"
    monkeypatch.setattr("bench.gpu.ceilings.RUNS", 1)
    bench = Bench(shapes.TINY, torch.device("cpu"), shapes.Served("none"))
    bench.device, bench._own_throughput = torch.device("cuda"), 30.0
    monkeypatch.setattr("bench.gpu.rows.free_memory", lambda device: None)
    run: list[Any] = []

    def process(arguments: list[str], **options: Any) -> Any:
        run.append((arguments, json.loads(options["input"])))
        return SimpleNamespace(returncode=0, stdout='log\n{"tokens": 6, "seconds": 2.0}\n')

    monkeypatch.setattr(subprocess, "run", process)
    throughput, ratio = bench.transformers()
    assert (throughput.value, ratio.value) == (3.0, 10.0)
    ((arguments, job),) = run
    assert arguments == [sys.executable, "-m", "bench.gpu.continuous_batching"]
    assert [len(prompt) for prompt in job["prompts"]] == [18, 18, 12]
    assert continuous_batching.Job(**job).output == shapes.TINY.compared_outputs


def test_blocks_of_an_arrival_are_written_beside_the_steps() -> None:
    """Else a benchmark of gaps measures its own copies."""
    may_write, joined, written = threading.Event(), [], list[Any]()

    class Arrival:
        def extend(self, tokens: int) -> None: ...

        def write(self, *block: Any) -> None:
            assert may_write.wait(60)
            written.append(block)

    transfers = SimpleNamespace(reserve=lambda one: Arrival(), join=lambda *entry: joined.append(entry))
    arrived: SimpleQueue[Any] = SimpleQueue()
    arrived.put((SimpleNamespace(prompt_len=3), [("address", b"bytes", 7)], SimpleNamespace(computed=3)))
    with ThreadPoolExecutor(1) as writer:
        arrivals = Arrivals(SimpleNamespace(transfers=transfers), arrived, writer)  # type: ignore[arg-type]
        arrivals.advance()
        arrivals.advance()
        assert not written
        assert not joined
        may_write.set()
        arrivals._writing[0][2].result(60)
        arrivals.advance()
    assert written == [("address", b"bytes", 7)]
    assert len(joined) == 1


@pytest.mark.parametrize(
    ("value", "is_most", "verdict"), [(0.8, False, "reached"), (0.4, False, "missed"), (0.4, True, "reached")]
)
def test_a_figure_is_compared_with_its_limit(value: float, is_most: bool, verdict: str) -> None:
    assert Row("r", value, "", 0.5, is_most=is_most).verdict == verdict


def test_idle_time_is_what_no_kernel_covers_between_steps() -> None:
    assert gaps_share([(0, 4), (2, 5), (10, 12), (11, 20)], 5.0) == pytest.approx(0.25)
    in_a_graph = [(float(at), at + 0.5) for at in range(100)]
    assert gaps_share(in_a_graph, 5.0) == 0.0
    assert gaps_share([], 5.0) == 0.0


def test_bytes_and_products_of_a_step_are_those_of_the_shape() -> None:
    model = shapes.make_model("tiny", 64, torch.device("cpu"))
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 128
    assert shapes.products(model) == 2 * (2 * layer + 64 * 512)
    assert shapes.weight_bytes(model) == 2 * (2 * (layer + 2 * 64) + 64 + 64 * 512)
    assert shapes.kv_bytes(model, 10) == 10 * 2 * 2 * 2 * 16 * 2
