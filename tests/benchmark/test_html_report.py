from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from decant.bench.benchmark import Result
from decant.bench.records import Record
from decant.bench.reports.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart
from decant.bench.reports.figures import details, summarise
from decant.bench.reports.html_report import to_html
from decant.client.results import Receipt

SLOS = {"ttft": 0.5}
SVG = "{http://www.w3.org/2000/svg}"


def run(rate: float) -> dict[str, object]:
    records = [
        Record(
            sent=n / rate,
            due=n / rate,
            prompt_tokens=10,
            tokens=[n / rate + 0.02 * rate + 0.01 * k for k in range(8)],
            receipt=Receipt(queue_ms=10 * rate, prefill_ms=8.0),
        )
        for n in range(20)
    ]
    about = {
        "model_id": "<m>",
        "date": "2026",
        "request_rate": rate,
        "max_concurrency": None,
        "ramp_to": None,
        "trace": False,
    }
    return {**about, **summarise(records, SLOS), **details(records)}


def charts(*rates: float) -> list[ElementTree.Element]:
    page = to_html(Result([run(rate) for rate in rates], "keeps <it>"), SLOS)
    assert "keeps &lt;it&gt;" in page
    assert "&lt;m&gt;" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def texts(chart: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in chart.iter(f"{SVG}text")]


def test_a_sweep_has_all_charts_and_a_run_those_of_one() -> None:
    titles = [texts(chart)[0] for chart in charts(1.0, 2.0, 4.0)]
    assert titles[:3] == ["TTFT over load", "TPOT over load", "Throughput against latency"]
    assert titles[3:] == [texts(chart)[0] for chart in charts(4.0)]
    assert [title.partition(",")[0] for title in titles[3:]] == [
        "Time to first token by phase",
        "Inter-token latency",
        "Requests in each pool",
    ]


def test_each_run_is_a_point_of_each_percentile() -> None:
    latency = charts(1.0, 2.0, 4.0)[0]
    assert len(list(latency.iter(f"{SVG}circle"))) == 9
    assert {"p50", "p90", "p99"} <= set(texts(latency))


def test_equal_gaps_are_all_in_the_distribution() -> None:
    """The gaps are 10 ms but for rounding, so that they may be in two bars."""
    _, latency, _ = charts(4.0)
    heights = [float(bar.get("height", 0)) for bar in latency.iter(f"{SVG}rect")]
    assert max(heights) > 0.9 * (HEIGHT - TOP - BOTTOM)
    assert sum(map(bool, heights)) <= 2


def test_points_lie_between_the_axes_in_proportion() -> None:
    chart = Chart("t", Axis("x", 10.0), Axis("y", 50.0))
    chart.line("l", [(0.0, 0.0), (5.0, 25.0), (10.0, 50.0)], "#000000")
    circles = list(ElementTree.fromstring(chart.svg()).iter(f"{SVG}circle"))
    xs, ys = ([float(one.attrib[name]) for one in circles] for name in ("cx", "cy"))
    assert xs == pytest.approx([LEFT, (LEFT + WIDTH - RIGHT) / 2, WIDTH - RIGHT])
    assert ys == pytest.approx([HEIGHT - BOTTOM, (HEIGHT - BOTTOM + TOP) / 2, TOP])


@pytest.mark.parametrize(
    ("end", "ticks"),
    [(10.0, [0, 2, 4, 6, 8, 10]), (0.7, [0, 0.2, 0.4, 0.6, 0.8]), (23.0, [0, 5, 10, 15, 20, 25]), (0.0, None)],
)
def test_ticks_are_round_numbers_that_reach_the_end(end: float, ticks: list[float] | None) -> None:
    axis = Axis("", end)
    assert axis.ticks[-1] >= end
    if ticks is not None:
        assert axis.ticks == pytest.approx(ticks)


def test_an_objective_is_drawn_where_the_chart_reaches_it() -> None:
    assert not any("objective" in text for text in texts(charts(1.0, 2.0)[0]))
    assert "objective 500 ms" in texts(charts(1.0, 30.0)[0])


def test_a_ramp_has_the_ttft_of_each_request_by_its_send() -> None:
    page = to_html(Result([{**run(2.0), "ramp_to": 8.0}], "a"), SLOS)
    chart = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0])
    assert texts(chart)[0] == "TTFT while the rate changes"
    assert "seconds (2 to 8/s)" in texts(chart)
    assert len(list(chart.iter(f"{SVG}circle"))) == 20


def test_a_run_without_a_success_has_charts_too() -> None:
    failed = Record(0.0, 0.0, error="NO_WORKER")
    about = {
        "model_id": "m",
        "date": "2026",
        "request_rate": float("inf"),
        "max_concurrency": None,
        "ramp_to": None,
        "trace": False,
    }
    page = to_html(Result([{**about, **summarise([failed], {}), **details([failed])}], "none"), {})
    assert page.count("<svg") == 3


def test_bars_of_the_phases_are_named_and_within_the_plot() -> None:
    chart = charts(1.0, 2.5, 4.0)[3]
    assert {"1/s", "2.5/s", "4/s"} <= set(texts(chart))
    bars = [bar for bar in chart.iter(f"{SVG}rect") if float(bar.get("width", 0)) != 10]  # others are the legend's
    ends = [float(bar.get("x", 0)) + float(bar.get("width", 0)) for bar in bars]
    assert len(bars) == 3 * 3
    assert max(ends) <= WIDTH - RIGHT
    assert min(float(bar.get("x", 0)) for bar in bars) >= LEFT
