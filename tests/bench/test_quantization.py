from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest

from bench import quantization, quantization_plot
from bench.comparison.steps import Case
from bench.quantization import KINDS
from tests.bench.test_plot import SVG


@pytest.mark.slow
def test_every_kind_is_measured_beside_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(quantization, "CASES", {"decode 2": Case(2, 8)})
    arguments = ["--model", "tiny", "--runs", "1", "--prompt", "64", "--threads", "1", "--no-quality", "--json", "-"]
    monkeypatch.setattr(sys, "argv", ["bench.quantization", *arguments])
    quantization.main()
    result = json.loads(capsys.readouterr().out)
    for times in result["milliseconds"].values():
        assert times.keys() == set(KINDS)
        assert min(times.values()) > 0
    sizes = result["weight_bytes"]
    assert sizes["int4"] < 0.7 * sizes["int8"] < 0.8 * sizes["bfloat16"]


def test_bars_of_the_picture_are_speeds_beside_bfloat16() -> None:
    times = {"decode 1": {"bfloat16": 20.0, "int8": 10.0, "int4": 5.0}}
    result = {
        "model_id": "m",
        "machine": {"cpu": "a CPU"},
        "threads": 2,
        "milliseconds": times,
        "openvino": {"decode 1": times["decode 1"]},
    }
    _, *bars = ElementTree.fromstring(quantization_plot.svg(result)).iter(f"{SVG}rect")
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [round(width / widths[0], 2) for width in widths] == [1.0, 2.0, 4.0] * 2
