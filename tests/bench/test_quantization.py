from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import pytest
from rich.console import Console

from bench import quantization, quantization_plot
from bench.baselines import llama_cpp_file
from bench.comparison.contenders import Contender, Unavailable
from bench.comparison.steps import Case
from bench.comparison.subprocess_runner import Job
from bench.quantization import KINDS, PEERS
from decant.bench import model_shapes
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
        "peers": {"OpenVINO": times, "llama.cpp": times},
    }
    _, *bars = ElementTree.fromstring(quantization_plot.svg(result)).iter(f"{SVG}rect")
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert [round(width / widths[0], 2) for width in widths] == [1.0, 2.0, 4.0] * 3


def test_a_peer_that_does_not_run_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(contender: Contender, job: Job, *_: Any) -> dict[str, float]:
        if contender is PEERS["OpenVINO"]:
            raise Unavailable("it can't be installed")
        return {"decode 1": 1.0 if job.weights == "int4" else 2.0}

    monkeypatch.setattr(quantization, "run_contender", run)
    found = quantization.measure_peers(Job("m", "bfloat16", 1), Console(stderr=True))
    assert found == {"llama.cpp": {"decode 1": {"bfloat16": 2.0, "int8": 2.0, "int4": 1.0}}}


def test_files_for_llama_cpp_have_layers_in_the_kind_and_an_int8_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = model_shapes.make("tiny", tmp_path / "model")
    for weights, layers, head in (("plain", "BF16", "BF16"), ("int8", "Q8_0", "Q8_0"), ("int4", "Q4_0", "Q8_0")):
        written = gguf.GGUFReader(llama_cpp_file.export(model, weights))
        types = {tensor.name: tensor.tensor_type.name for tensor in written.tensors}
        assert types["blk.1.ffn_down.weight"] == types["blk.0.attn_q.weight"] == layers
        assert types["token_embd.weight"] == head
        assert types["output_norm.weight"] == "F32"
