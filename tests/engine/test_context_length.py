from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from decant.engine.checkpoint.context_length import default_length
from decant.runtime.model_files import find

ORIGINAL = "original_max_position_embeddings"
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "linear", "factor": 4.0, ORIGINAL: 64}, 256),
        ({"rope_type": "linear", "factor": 4.0, ORIGINAL: 256}, 256),
        ({"rope_type": "default", "factor": 4.0, ORIGINAL: 128}, 256),
        ({"rope_type": "dynamic", "factor": 4.0, ORIGINAL: 128}, 256),
        ({"rope_type": "longrope", "factor": 4.0, ORIGINAL: 128, **LONG}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 64}, 256),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 128}, 512),
        ({"rope_type": "yarn", "factor": None, ORIGINAL: 64}, 256),
        ({"rope_type": "llama3", "factor": 8.0, ORIGINAL: 64, **BANDS}, 512),
        ({"type": "linear", "factor": 4.0, ORIGINAL: 64}, 256),
        ({"type": "yarn", "factor": 4.0, ORIGINAL: 128}, 512),
    ],
    ids=str,
)
def test_router_and_worker_serve_the_same_length(
    key: str, scaling: dict[str, Any], length: int, tmp_path: Path
) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps({**config, key: {"rope_theta": 1e4, **scaling}}))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert (find(str(tmp_path)).context_length, default_length(loaded, 256)) == (length, length)
