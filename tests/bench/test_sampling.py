from __future__ import annotations

import json

import pytest
import torch

from bench import sampling
from decant.engine.backends import make_backend
from tests.e2e.fork_server import completed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", sampling.KINDS)
def test_contenders_draw_the_same_tokens(name: str) -> None:
    rows, logits = sampling.make_rows(5, 3000, sampling.KINDS[name]), sampling.make_logits(5, 3000)
    drawn = make_backend(torch.device("cpu")).sampler.sample(rows, logits, frozenset())
    assert len(set(drawn)) > 1
    assert sampling.in_tensor_operations(rows, logits) == drawn


def test_every_kind_of_sampling_is_measured() -> None:
    options = ("--rows", "3", "--vocabulary", "1000", "--runs", "1", "--json", "-")
    result = json.loads(completed("bench.sampling", *options).stdout)
    assert set(result["kinds"]) == set(sampling.KINDS)
    assert all(ms > 0 for times in result["kinds"].values() for ms in times.values())
    assert result["machine"]["cores"] >= 1
