import json
import math
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from tests.e2e.fork_server import completed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_steps_are_watched_alone_and_beside_each_move(model: Path) -> None:
    options = ("--mib", "48", "--runs", "2", "--seconds", "0.5", "--prompts", "1", "--json", "-")
    ended = completed("bench.handoff", "--model", str(model), *options, timeout=250)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert len(result["bare_s"]) == len(result["handoff_s"]) == len(result["tls_s"]) == 2
    for end in ("sender", "receiver"):
        assert set(result["all_at_once"][end]["step_ms"]) == {"alone", "bare", "handoff", "tls"}
    ratios = [result["ratio"], *(ratio for ends in result["step_slower"].values() for ratio in ends.values())]
    assert len(ratios) == 5
    assert all(ratio > 0 and math.isfinite(ratio) for ratio in ratios)


@pytest.mark.slow
def test_a_cache_longer_than_any_sequence_of_the_model_is_refused(model: Path) -> None:
    ended = completed("bench.handoff", "--model", str(model), "--mib", "1024")
    assert ended.returncode == 1
    assert "mib" in ended.stderr
    assert "1024" in ended.stderr
