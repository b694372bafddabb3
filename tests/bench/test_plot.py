from typing import Any
from xml.etree import ElementTree

from bench.comparison import plot

SVG = "{http://www.w3.org/2000/svg}"


def result(rates: dict[str, float], limit: float | None) -> dict[str, Any]:
    contenders = {contender: {"output_throughput": rate} for contender, rate in rates.items()}
    workload = {"contenders": contenders, "allowed": {"output_throughput": limit} if limit else None}
    facts = {"model_id": "a < b & c", "dtype": "bfloat16", "threads": 2, "date": "2026-01-02T03:04:05+00:00"}
    unavailable = {"vllm": "ERROR: <no> wheel & more"}
    return {**facts, "machine": {"cpu": "a CPU"}, "workloads": {"w": workload}, "unavailable": unavailable}


def test_every_contender_has_a_bar_to_scale_and_the_limit_is_beyond_the_engines() -> None:
    drawn = ElementTree.fromstring(plot.svg(result({"decant": 30.0, "static": 10.0}, limit=40.0)))
    _, ours, static = drawn.iter(f"{SVG}rect")
    assert float(ours.attrib["width"]) == 3 * float(static.attrib["width"])
    (limit,) = drawn.iter(f"{SVG}line")
    start = float(ours.attrib["x"])
    assert abs((float(limit.attrib["x1"]) - start) / float(ours.attrib["width"]) - 40 / 30) < 0.01
    texts = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert "Output tokens per second: a < b & c, bfloat16" in texts
    assert any("vLLM was left out: ERROR: <no> wheel & more" in text for text in texts)


def test_all_shapes_lie_within_the_plot() -> None:
    drawn = ElementTree.fromstring(plot.svg(result({"decant": 30.0, "static": 90.0}, limit=40.0)))
    paper, *bars = drawn.iter(f"{SVG}rect")
    width, height = float(paper.attrib["width"]), float(paper.attrib["height"])
    assert all(float(bar.attrib["x"]) + float(bar.attrib["width"]) < width for bar in bars)
    assert all(float(each.attrib["y"]) < height for each in (*bars, *drawn.iter(f"{SVG}text")))


def test_without_a_limit_there_is_no_line() -> None:
    drawn = ElementTree.fromstring(plot.svg(result({"decant": 30.0}, limit=None)))
    assert not list(drawn.iter(f"{SVG}line"))
