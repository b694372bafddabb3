from __future__ import annotations

import pytest
from transformers import LlamaConfig

from decant.engine.checkpoint.checkpoint import _surplus

DEEPER = "model.layers.2.mlp.up_proj.weight"


@pytest.mark.parametrize("count", [None, 0, "1", [1], 1.5])
def test_a_deeper_file_is_surplus_whatever_the_configuration_says_instead_of_a_count(count):
    config = LlamaConfig(num_hidden_layers=2)
    config.num_nextn_predict_layers = count
    assert _surplus([DEEPER], config) == [DEEPER]


def test_layers_that_predict_further_tokens_are_not_surplus():
    config = LlamaConfig(num_hidden_layers=2)
    config.num_nextn_predict_layers = 1
    last = "model.layers.3.mlp.up_proj.weight"
    assert _surplus([DEEPER, last, "model.layers.1.self_attn.rotary_emb.inv_freq"], config) == [last]
