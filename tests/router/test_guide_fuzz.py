"""Random and hostile guides: each is refused by its field, or its grammar gives bounded masks until an output ends."""

from __future__ import annotations

import resource

import pytest

from tests.engine.guides.hostile import guide
from tests.fuzz.guides import new_check, outcome

GUIDES = 60
MAX_GROWTH_MB = 400


@pytest.mark.slow
async def test_random_guides_are_refused_by_their_field_or_followed() -> None:
    """More of them: ``make fuzz``."""
    check = new_check()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = [await outcome(check, guide(seed)) for seed in range(GUIDES)]
    admitted = sum(outcome.is_admitted for outcome in outcomes)
    assert 0.2 * GUIDES < admitted < 0.95 * GUIDES
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_GROWTH_MB * 1024
