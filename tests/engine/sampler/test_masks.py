"""A mask of allowed tokens draws what forbidding each other token draws."""

from __future__ import annotations

import random
from array import array
from functools import partial

import pytest
import torch

from decant.engine.logits_processors import Allow, Edit, Forbid, LogitsProcessor
from decant.engine.plan import Row
from decant.engine.request import Request
from decant.engine.sampler_state import SamplerState
from tests.engine.sampler.harness import MIXES, VOCAB, both_samplers, logits_of, row, sample


class Fixed(LogitsProcessor):
    def __init__(self, edit: Edit) -> None:
        self._edit = edit

    def edit(self, *_: object) -> Edit:
        return self._edit


def with_edit(drawn: Row, edit: Edit) -> Row:
    state = SamplerState(drawn.request)
    state.processors = (*state.processors, Fixed(edit))
    return drawn._replace(state=state)


def masked(seed: int, vocabulary: int, dtype: torch.dtype) -> tuple[list[int], list[int]]:
    """Tokens drawn by masks, of any length in words, and by the same tokens forbidden."""
    draw = random.Random(seed)
    kinds = [mix for mix in MIXES.values() if vocabulary >= VOCAB or "logit_bias" not in mix]
    rows = [row(mix, seed=seed) for mix in kinds]
    if vocabulary < VOCAB:
        requests = [Request("r", (0,), sampling=one.request.sampling) for one in rows]
        rows = [Row(one, [0, 0], 1, 2, (array("i"),), True) for one in requests]
    logits = logits_of(seed, len(rows), max(vocabulary, VOCAB))[:, :vocabulary].to(dtype)
    words = [draw.randrange(1, -(-vocabulary // 32) + 2) for _ in rows]
    allowed = [{0, *draw.sample(range(min(vocabulary, 32 * w)), min(vocabulary, 5))} for w in words]
    bits = [sum(1 << token for token in tokens) | 1 << (32 * w - 1) for w, tokens in zip(words, allowed, strict=True)]
    masks = [Allow(mask.to_bytes(4 * w, "little")) for w, mask in zip(words, bits, strict=True)]
    others = [{token for token in range(vocabulary) if not mask >> token & 1} for mask in bits]
    of = partial(sample, logits=logits, eos=frozenset())
    return of(list(map(with_edit, rows, masks))), of(list(map(with_edit, rows, map(Forbid, others))))


@both_samplers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [1, 7, 8, 31, 33, 1000, 1025])
def test_a_mask_draws_what_forbidding_each_other_token_draws(vocabulary: int, dtype: torch.dtype) -> None:
    for seed in range(3):
        by_mask, by_token = masked(seed, vocabulary, dtype)
        assert by_mask == by_token
