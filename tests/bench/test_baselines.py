import subprocess
import sys
import textwrap
import venv
from collections.abc import Iterable
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import engine, workloads
from bench.baselines import environment
from bench.comparison import contenders, report
from bench.comparison import subprocess_runner as child
from bench.comparison.contenders import CONTENDERS, Contender
from bench.comparison.open_loop import run_open_loop
from bench.comparison.subprocess_runner import ChildFailed, Job
from bench.workloads import Item
from tests.bench import fork_server as forked

WORKS = """
    from bench.comparison.metrics import Served, summarise

    def measure(job, on_progress):
        print("chatter of a library")
        on_progress(0.5)
        return summarise([Served(item.id, 1, 0.0, [1.0] * item.output_len) for item in job.items])
"""
RAISES = """
    import sys

    def measure(job, on_progress):
        sys.exit(f"[rank0]: no such thing as {job.dtype} here")
"""
DIES = """
    import os, signal, sys

    def measure(job, on_progress):
        print("a warning of no weight", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGILL)
"""
JOB = Job("nowhere", "bfloat16", 1, (Item("a", [1, 2], 3, 0.0),))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"works": WORKS, "raises": RAISES, "dies": DIES}.items():
        (tmp_path / f"baseline_{name}.py").write_text(textwrap.dedent(text))
    root = Path(engine.__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")


@pytest.mark.slow
def test_what_a_baseline_imports_needs_no_package_of_the_client() -> None:
    """The environments of other engines have neither protobuf nor gRPC."""
    blocked = "import sys; sys.modules |= {'google.protobuf': None, 'grpc': None}"
    imported = "import bench.comparison.open_loop, bench.comparison.subprocess_runner, decant.bench.model_shapes"
    done = subprocess.run([sys.executable, "-c", f"{blocked}; {imported}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "reason"), [("raises", "[rank0]: no such thing as bfloat16 here"), ("dies", "ended by SIGILL")]
)
def test_a_failed_child_gives_its_reason_in_one_line(scripts: None, name: str, reason: str) -> None:
    with pytest.raises(ChildFailed) as caught:
        child.run(f"baseline_{name}", JOB, lambda _: None)
    assert caught.value.reason == reason


def test_a_silent_child_is_killed(scripts: None, tmp_path: Path) -> None:
    (tmp_path / "baseline_hangs.py").write_text("import signal\n\ndef measure(job, on_progress):\n    signal.pause()\n")
    with pytest.raises(ChildFailed) as caught:
        child.run("baseline_hangs", JOB, lambda _: None, silence_s=0.5)
    assert caught.value.reason == "ended by SIGKILL"


def test_the_child_needs_no_installed_package(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare")
    with pytest.raises(ChildFailed, match=r"module 'bench\.workloads' has no attribute 'measure'"):
        child.run("bench.workloads", JOB, lambda _: None, tmp_path / "bare" / "bin" / "python")


@pytest.mark.slow
def test_contenders_run_after_another_one_failed(
    scripts: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = {name: Contender(name, f"baseline_{name}") for name in ("raises", "works", "dies")}
    monkeypatch.setattr(contenders, "CONTENDERS", {**CONTENDERS, **fakes})
    monkeypatch.setattr(child, "run", partial(forked.run_one_of, (CONTENDERS["decant"].module,), child.run))
    path = tmp_path / "w.jsonl"
    workloads.write(JOB.items, path)
    options = ["--no-limits", "--runs", "2", "--threads", "1", "--baseline-dtype", "float32"]
    args = engine.parse(["--model", str(tiny), "--workload", str(path), *options])
    args.baselines = tuple(fakes)
    *_, result = engine.bench(args, Console(file=sys.stderr))
    assert set(result["contenders"]) == {"decant", "works"}
    assert [len(result["contenders"][contender]["runs"]) for contender in ("decant", "works")] == [2, 2]
    assert set(result["unavailable"]) == {"raises", "dies"}
    console = Console(record=True, width=200, file=StringIO())
    report.show(result, console)
    text = console.export_text()
    assert "raises was left out: [rank0]: no such thing as float32 here" in text
    assert "Decant ran in bfloat16, all others in float32." in text


@pytest.mark.slow
def test_baselines_that_cannot_be_installed_are_unavailable_and_not_marked_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "cache_folder", lambda: tmp_path / "bench")
    requirements = tmp_path / "needs.txt"
    requirements.write_text("./no-such-folder-of-a-package\n")
    errors: list[str] = []
    contender = Contender("needs what isn't there", "baseline_works", requirements)
    with pytest.raises(contenders.Unavailable, match="it can't be installed: ERROR"):
        contenders.run(contender, JOB, lambda _: None, errors.append)
    assert any("ERROR" in line for line in errors)
    assert not list(tmp_path.glob("baselines/*/complete"))


class Scripted:
    def __init__(self, burst: int) -> None:
        self.added: list[str] = []
        self._left: dict[str, int] = {}
        self._burst = burst

    def add(self, item: Item) -> None:
        self.added.append(item.id)
        self._left[item.id] = item.output_len

    def step(self) -> Iterable[str]:
        drawn = [id for id, left in self._left.items() for _ in range(min(self._burst, left))]
        for id in drawn:
            self._left[id] -= 1
        return drawn


@pytest.mark.parametrize("burst", [1, 3])
def test_an_open_loop_sends_each_at_its_time_and_counts_every_token(burst: int) -> None:
    items = [Item("late", [1, 2], 2, 0.05), Item("first", [1], 5, 0.0)]
    shares: list[float] = []
    server = Scripted(burst)
    late, first = run_open_loop(server, items, shares.append)
    assert server.added == ["first", "late"]
    assert (late.id, len(late.tokens), first.id, len(first.tokens)) == ("late", 2, "first", 5)
    assert late.tokens[0] >= late.sent == 0.05
    assert shares[-1] == 1.0


def test_a_surplus_token_fails_the_measurement() -> None:
    class Generous(Scripted):
        def step(self) -> Iterable[str]:
            drawn: list[Any] = [*super().step(), "a"]
            return drawn

    with pytest.raises(RuntimeError, match="a: "):
        run_open_loop(Generous(1), [Item("a", [1], 2, 0.0), Item("b", [1], 3, 0.0)], lambda _: None)
