from __future__ import annotations

import numpy as np
import pytest

import decant.engine.model.sampler as sampler_module
from decant.engine.counter_rng import counter_uniform
from tests.engine import p_values
from tests.engine.sampler.harness import EOS, OUTPUT, both_samplers, logits_of, row, sample

pytestmark = pytest.mark.slow


@both_samplers
def test_a_draw_depends_only_on_seed_output_index_and_position():
    logits = logits_of(3)
    first = [sample([row({}, seed=seed)], logits, EOS)[0] for seed in range(200)]
    assert first == [sample([row({}, seed=seed)], logits, EOS)[0] for seed in range(200)]
    others = (
        [row({}, seed=seed + 200) for seed in range(200)],
        [row({}, seed=seed, output_index=1) for seed in range(200)],
        [row({}, seed=seed, output=OUTPUT[:-1]) for seed in range(200)],
    )
    assert all(sample(rows, logits.expand(200, -1), EOS) != first for rows in others)


def test_a_position_counts_output_tokens_only(monkeypatch):
    batch: list[tuple[int, ...]] = []

    def number(*where: int) -> float:
        batch.append(where)
        return 0.5

    monkeypatch.setattr(sampler_module, "counter_uniform", number)
    sample([row({}, seed=6, output_index=2), row({}, seed=7, output=())], logits_of(0, 2), EOS)
    assert batch == [(6, 2, len(OUTPUT)), (7, 0, 0)]


def test_random_numbers_are_uniform_and_independent():
    for line in (
        [counter_uniform(seed, 0, 0) for seed in range(5000)],
        [counter_uniform(1, index, 0) for index in range(5000)],
        [counter_uniform(1, 0, position) for position in range(5000)],
    ):
        values = np.array(line)
        assert len(set(line)) == len(line)
        assert values.min() > 0
        assert values.max() < 1
        assert p_values.of_uniform(values) > 1e-3
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.05
    assert counter_uniform(1, 2, 3) not in (
        counter_uniform(2, 1, 3),
        counter_uniform(1, 3, 2),
        counter_uniform(3, 2, 1),
    )
