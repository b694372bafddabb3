import io
import json
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from bench import engine
from bench.comparison import subprocess_runner as child
from bench.comparison.own_engine import make_engine
from bench.comparison.steps import Profile
from decant.engine.cpu.fused_layer import NativeLayer
from decant.engine.loading import load
from decant.engine.model.model import ModelConfig
from tests.bench import fork_server as forked
from tests.engine import tiny as models_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("table") / "out.json"
    options = ("--threads", "1", "--runs", "1", "--baselines", "none", "--kv-bytes", str(1 << 28))
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(io.StringIO()) as output:
        patch.setattr(child, "run", forked.run)
        patch.setattr("signal.signal", lambda *_: None)
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", ["engine", "--model", str(tiny), "--json", str(out), *options])
        assert engine.main() == 0, output.getvalue()
    assert "prompt of 1,750" in " ".join(output.getvalue().split())
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_every_row_was_measured(measured: dict[str, Any]) -> None:
    rows = {line["name"]: line for line in measured["lines"]}
    assert len(rows) == 12
    for name, line in rows.items():
        if name != "mixed, longest gap":  # a fast machine may finish before the prompt arrives
            assert line["measured"] > 0, name
    for name in ("decode, 1 at 128 tokens", "decode, 8 at 256 tokens", "exponential", "long-prompts"):
        assert rows[name]["share"] > 0


def test_weights_are_counted_as_the_shape_has_them(measured: dict[str, Any]) -> None:
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128
    assert measured["steps"]["weights"] == {"body": 2 * layer, "head": 512 * 64, "table": 512 * 64, "itemsize": 2}


def test_memory_for_blocks_is_not_counted_as_weights(measured: dict[str, Any]) -> None:
    assert 0 < measured["steps"]["held_bytes"] < measured["kv_bytes"] / 2


def test_one_sequence_is_held_against_what_was_read_between_its_steps(measured: dict[str, Any]) -> None:
    meanwhile = measured["steps"]["cases"]["decode 1"]["read_bandwidth_gb_s"]
    (line,) = (line for line in measured["lines"] if line["name"].startswith("decode, 1"))
    assert line["limit"] == pytest.approx(2 * (measured["steps"]["weights"]["body"] + 512 * 64) / (meanwhile * 1e6))


def test_a_profile_has_no_negative_part(measured: dict[str, Any]) -> None:
    prompt = measured["steps"]["prompt"]
    for case in (*measured["steps"]["cases"].values(), prompt):
        assert set(case["profile"]) == {"linears", "attention", "other", "outside"}
        assert all(seconds > 0 for seconds in case["profile"].values())
    assert sum(tokens for _, tokens, _ in prompt["schedule"]) == 1750


def test_a_profile_looks_into_layers_that_are_one_call_and_leaves_them_so(tmp_path: Path) -> None:
    models_of.save(models_of.config("llama", hidden_size=128, intermediate_size=192, head_dim=32), tmp_path)
    device = load(ModelConfig(str(tmp_path), device="cpu", kv_bytes=1 << 20))
    engine = make_engine(device, 64)
    engine.add(models_of.greedy("r", (1, 2, 3), 1))
    before = [module.forward for module in device.model.modules() if isinstance(module.forward, NativeLayer)]
    profile = Profile(device.model)
    parts = profile.of(engine.step)
    profile.close()
    assert parts["linears"] > 0
    assert parts["attention"] > 0
    assert [module.forward for module in device.model.modules() if isinstance(module.forward, NativeLayer)] == before


def test_each_sequence_wastes_half_a_block_on_average(measured: dict[str, Any]) -> None:
    waste = measured["waste"]
    assert 400 < waste["context"] < 600
    assert waste["lost"] * waste["context"] == pytest.approx(waste["block_size"] / 2, rel=0.15)


def test_the_steps_of_a_workload_compute_every_token_once(measured: dict[str, Any]) -> None:
    ours = measured["workloads"]["exponential"]["contenders"]["decant"]
    assert sum(rows for _, _, rows in ours["schedule"]) == ours["total_output_tokens"]
    computed = ours["total_input_tokens"] + ours["total_output_tokens"] - ours["completed"]
    assert sum(tokens for _, tokens, _ in ours["schedule"]) == computed
