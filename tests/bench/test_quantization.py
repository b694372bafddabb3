from __future__ import annotations

import json
import sys

import pytest

from bench import quantization
from bench.comparison.steps import Case
from bench.quantization import KINDS


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
