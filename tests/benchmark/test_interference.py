from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from decant.bench import model_shapes
from decant.bench.errors import InvalidBenchmark
from decant.bench.interference import experiment, report
from decant.bench.interference.configurations import (
    BY_TIME,
    SPLIT,
    UNCHUNKED,
    Configuration,
    InterferenceOptions,
    configurations,
    parse_chunks,
)
from decant.bench.interference.experiment import figures
from decant.bench.interference.html_report import to_html
from decant.bench.interference.trial import Stamps, Trial, check, summarise
from decant.bench.interference.verdict import sentence
from decant.bench.reports.report import dump
from decant.command.bench.interference import _starter
from decant.command.deployment import temporary_deployment
from decant.command.up.options import UpOptions
from decant.command.up.plan import make_plan
from decant.protos import inference_pb2 as pb
from decant.runtime.cores import usable_cores

SVG = "{http://www.w3.org/2000/svg}"
OPTIONS = InterferenceOptions(running=8, prompt_tokens=3000)


def test_gaps_and_rates_are_those_computed_by_hand() -> None:
    running = [[0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 5.0, 6.0, 7.0], [0.25, 1.25, 2.5, 5.25, 8.0]]
    trial = summarise(Stamps(running, settled=1.0, sent=2.0, long=[5.0, 5.5, 6.0]))
    assert (trial.ttft, trial.window) == (3.0, 3.5)
    assert trial.before == [(-0.5, 0.5), (0.0, 0.5)]
    # The gap from 1.25 to 2.5 is cut by the send, those to 6.0 and 8.0 by the second token.
    assert trial.during == [(2.0, 2.0), (3.0, 1.0), (4.0, 1.0), (0.5, 1.25), (3.25, 2.75), (6.0, 2.75)]
    assert trial.before_rate == 3 / 1.0
    assert trial.during_rate == 4 / 3.5


def trial(longest: float, ttft: float, rate: float = 60.0) -> Trial:
    return Trial(ttft, ttft + 0.1, [(-0.1, 0.04)] * 3, [(0.1, 0.05), (0.2, 0.05), (0.9, longest)], 100.0, rate)


def test_figures_are_medians_of_the_trials_and_the_worst_of_all() -> None:
    row = figures(Configuration("c", 0, 1), [trial(0.3, 3.0), trial(0.1, 5.0), trial(0.2, 4.0, 80.0)])
    assert (row["longest_gap_ms"], row["worst_gap_ms"], row["median_gap_ms"]) == (200.0, 300.0, 50.0)
    assert row["median_gap_before_ms"] == pytest.approx(40.0)
    assert (row["ttft_ms"], row["output_throughput"], row["output_throughput_before"]) == (4000.0, 60.0, 100.0)
    assert [gap for _, gap in row["gaps"]] == [40.0, 40.0, 40.0, 50.0, 50.0, 300.0]


def test_deployments_are_unchunked_chunked_by_time_and_split() -> None:
    made = {one.name: one for one in configurations(OPTIONS)}
    sizes = (64, 128, 256, 512, 1024, 2048)
    assert list(made) == [UNCHUNKED, *(f"mixed, chunks of {size:,}" for size in sizes), BY_TIME, SPLIT]
    assert made[UNCHUNKED].variables["DECANT_TOKEN_BUDGET"] == "3008", "the prompt and a token of each answer"
    assert [one.name for one in made.values() if not one.is_mixed] == [SPLIT]
    short = configurations(InterferenceOptions(prompt_tokens=500))
    assert [one.chunk for one in short if one.chunk] == [64, 128, 256], "a chunk of the whole prompt is none"


def test_every_process_accepts_the_settings_of_each_deployment() -> None:
    for one in configurations(InterferenceOptions()):
        plan = make_plan(UpOptions(prefill=one.prefill, decode=one.decode), "redis://localhost", one.variables)
        assert len(plan.workers) == one.prefill + one.decode
        given = {**plan.workers[0].environment, **plan.routers[0].environment}
        assert given.items() >= one.variables.items()
        assert {core for worker in plan.workers for core in worker.cores} == set(usable_cores())


def rows(split: tuple[float, float], mixed: tuple[float, float]) -> list[dict[str, Any]]:
    made = configurations(InterferenceOptions(chunks=(64, 256)))
    by_name = {UNCHUNKED: (2.0, 3.0), "mixed, chunks of 64": (mixed[0] * 2, 9.0), "mixed, chunks of 256": mixed}
    by_name |= {BY_TIME: (mixed[0] * 3, 4.0), SPLIT: split}
    return [figures(one, [trial(*by_name[one.name])]) for one in made]


@pytest.mark.parametrize(
    ("split", "mixed", "choice"),
    [
        ((0.15, 12.0), (0.6, 4.0), "better choice where gaps of 600 ms are acceptable, the split where they are not"),
        ((0.58, 12.0), (0.6, 4.0), "mixed workers are the better choice here (mixed, chunks of 256)"),
        ((0.15, 3.0), (0.6, 4.0), "the split is better in both"),
    ],
)
def test_the_headline_says_what_the_split_gives_costs_and_when_mixed_is_better(
    split: tuple[float, float], mixed: tuple[float, float], choice: str
) -> None:
    text = sentence(rows(split, mixed), OPTIONS)
    assert text.endswith(choice)
    assert f"longest gap is {split[0] * 1e3:.0f} ms with the split, 600 ms with mixed, chunks of 256" in text
    assert "2.00 s unchunked" in text
    assert f"first token takes {split[1]:.2f} s instead of 4.00 s" in text
    assert "100 instead of 100 tokens/s before it and 60 instead of 60 meanwhile" in text


@pytest.fixture
def document(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    running: list[str] = []
    ended: list[str] = []

    @contextlib.contextmanager
    def start(configuration: Configuration) -> Iterator[Sequence[str]]:
        assert not running, "one deployment at a time has the cores"
        running.append(configuration.name)
        try:
            yield (configuration.name,)
        finally:
            ended.append(running.pop())

    async def scripted(addresses: Sequence[str], options: InterferenceOptions, number: int) -> Trial:
        assert addresses == (running[0],)
        return trial(0.1 if running[0] == SPLIT else 0.5, 9.0 if running[0] == SPLIT else 2.0)

    monkeypatch.setattr(experiment, "_trial", scripted)
    progress: list[tuple[int, int]] = []
    options = InterferenceOptions(chunks=(64, 256), trials=2)
    made = experiment.measure("<m>", options, start, lambda what, done, parts: progress.append((done, parts)))
    assert ended == [row["name"] for row in made["configurations"]]
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1] == (15, 15)
    return made


def test_reports_have_every_configuration_and_the_answer(document: dict[str, Any]) -> None:
    assert json.loads(dump(document)) == document
    out = StringIO()
    report.show(document, Console(file=out, width=240))
    page = to_html(document)
    assert "&lt;m&gt;" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    for row in document["configurations"]:
        assert row["name"] in out.getvalue()
        assert row["name"] in page
    assert document["sentence"] in out.getvalue()
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    # 64, 256 and unchunked by chunk; all five by TTFT.
    assert [len(list(chart.iter(f"{SVG}circle"))) for chart in charts[:4]] == [3, 3, 3, 5]
    assert any("split 100 ms" in (text.text or "") for text in charts[0].iter(f"{SVG}text"))


@pytest.mark.parametrize(
    ("model", "name", "served"),
    [("tiny", "tiny", ["--model", "made/tiny"]), (None, "tiny-python", []), ("x/y", "y", ["--model", "x/y"])],
)
def test_a_shape_is_served_with_random_weights_and_other_models_as_they_are(
    model: str | None, name: str, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def started(*arguments: str, variables: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(addresses=arguments)

    monkeypatch.setattr(temporary_deployment, "temporary_deployment", started)
    monkeypatch.setattr(model_shapes, "make", lambda shape: Path("made") / shape)
    found, start = _starter(model, None)
    with start(Configuration("c", 1, 1)) as arguments:
        assert list(arguments) == ["--prefill", "1", "--decode", "1", *served]
    assert found == name


def test_invalid_options_are_refused() -> None:
    assert parse_chunks("256, 64") == (64, 256)
    for text in ("", "0", "x"):
        with pytest.raises(InvalidBenchmark, match="--chunks: whole numbers from 1"):
            parse_chunks(text)
    with pytest.raises(InvalidBenchmark, match="--chunks: at least 33 for 32 running answers, got 16"):
        configurations(InterferenceOptions(running=32, chunks=(16, 64)))
    with pytest.raises(InvalidBenchmark, match="--prompt-tokens: at most 2,040"):
        check(pb.Model(id="m", max_context_length=2048), InterferenceOptions(prompt_tokens=2041))
