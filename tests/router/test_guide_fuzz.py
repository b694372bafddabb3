"""Random and hostile guides: each is refused by its field, or its grammar gives bounded masks until an output ends."""

from __future__ import annotations

import resource
import time
from typing import NamedTuple

import pytest

from decant import models
from decant.engine.errors import InvalidRequest
from decant.engine.guides.guide import Guide
from decant.router.text.guide_check import GuideCheck
from decant.runtime.errors import InvalidArgument
from tests.engine.guides.hostile import guide
from tests.engine.guides.walk import END, VOCABULARY, allowed, compiler

GUIDES = 60
MAX_TOKENS = 40
MAX_GROWTH_MB = 400


class Outcome(NamedTuple):
    """What became of a guide: whether it was admitted, seconds of its check, and milliseconds of its slowest mask."""

    is_admitted: bool
    check_s: float
    slowest_ms: float = 0.0
    failed: str = ""


async def outcome(check: GuideCheck, made: Guide | InvalidRequest) -> Outcome:
    if isinstance(made, InvalidRequest):
        return Outcome(False, 0.0)
    began = time.monotonic()
    try:
        await check.check(made)
    except InvalidArgument:
        return Outcome(False, time.monotonic() - began)
    return follow(made, time.monotonic() - began)


def follow(made: Guide, check_s: float) -> Outcome:
    """Compile an admitted guide as workers do, and follow it through an output."""
    grammar = compiler().grammar(made)
    grammar.prepare()
    matcher, slowest = grammar.new_matcher(), 0.0
    for step in range(MAX_TOKENS):
        began = time.process_time()
        mask = matcher.compute_bitmask()
        slowest = max(slowest, time.process_time() - began)
        tokens = allowed(mask)
        if matcher.is_error():
            return Outcome(True, check_s, 1000 * slowest, matcher.get_error())
        assert len(tokens), made
        token = int(tokens[(7 * step) % len(tokens)])
        if token == END:
            break
        began = time.process_time()
        matcher.consume_token(token)
        slowest = max(slowest, time.process_time() - began)
    return Outcome(True, check_s, 1000 * slowest)


def new_check() -> GuideCheck:
    return GuideCheck(models.path() / "tokenizer.json", VOCABULARY, [END])


@pytest.mark.slow
async def test_random_guides_are_refused_by_their_field_or_followed() -> None:
    check = new_check()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = [await outcome(check, guide(seed)) for seed in range(GUIDES)]
    admitted = sum(outcome.is_admitted for outcome in outcomes)
    assert 0.2 * GUIDES < admitted < 0.95 * GUIDES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_MB * 1024
