from __future__ import annotations

import itertools
from array import array

import pytest
import torch

from decant.engine.cpu.kernels.loader import KERNELS
from decant.engine.cpu.sampler import SCORES_AT_ONCE
from decant.engine.model.sampler import PIECE
from decant.engine.plan import Row
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState
from tests.engine.sampler.harness import EOS, MIXES, OUTPUT, VOCAB, both_samplers, logits_of, row, sample

pytestmark = pytest.mark.slow


@both_samplers
@pytest.mark.parametrize("vocabulary", [VOCAB, 3000])
def test_a_row_gets_the_same_token_alone_and_in_a_mixed_batch(vocabulary):
    rows = [
        row(mix, output=OUTPUT[:written], min_tokens=least, seed=seed)
        for seed, (mix, written, least) in enumerate(itertools.product(MIXES.values(), (0, 1, 5), (0, 3)))
    ]
    logits = logits_of(5, len(rows), vocabulary)
    together = sample(rows, logits.clone(), EOS)
    assert together == [sample([one], logits[at : at + 1].clone(), EOS)[0] for at, one in enumerate(rows)]
    assert vocabulary == VOCAB or len(rows) > SCORES_AT_ONCE // vocabulary
    backwards = sample(rows[::-1], logits.flip(0), EOS)
    assert together == backwards[::-1]


@pytest.mark.skipif(KERNELS is None, reason="this CPU has no AVX2, or no compiler was here")
@pytest.mark.parametrize("vocabulary", [1, 7, 8, PIECE - 1, PIECE + 1, 3000])
def test_bfloat16_and_threads_do_not_change_tokens(vocabulary):
    kinds = [row(mix, seed=seed).request.sampling for seed, mix in enumerate(MIXES.values()) if "logit_bias" not in mix]
    requests = [Request("r", (0,), sampling=kind) for kind in kinds]
    rows = [Row(one, [0, 0], 1, 2, (array("i"),), True, SamplerState(one)) for one in requests]
    logits = logits_of(5, len(rows), max(vocabulary, VOCAB))[:, :vocabulary].to(torch.bfloat16)
    expected = sample(rows, logits.float().contiguous(), frozenset())
    assert sample(rows, logits, frozenset()) == expected
    torch.set_num_threads(2)
    assert sample(rows, logits, frozenset()) == expected
    assert sample(rows, logits.mT.contiguous().mT, frozenset()) == expected


@both_samplers
def test_sampling_does_not_change_the_logits():
    logits = logits_of(2, len(MIXES))
    before = logits.clone()
    sample([row(mix) for mix in MIXES.values()], logits, EOS)
    assert torch.equal(logits, before)


@both_samplers
def test_a_greedy_row_of_a_mixed_batch_takes_its_known_token() -> None:
    logits = logits_of(3, 3)
    rows = [row({"temperature": 0.0}), row({"temperature": 1.0}, seed=5), row({"temperature": 0.0})]
    drawn = sample(rows, logits, EOS)
    assert sample(rows, logits, EOS, torch.tensor([11, 12, 13])) == [11, drawn[1], 13]
