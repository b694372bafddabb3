from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from decant.engine.kv_layout import FULL
from tests.engine import state_machine as machine
from tests.engine.state_machine import Windows, play

Patch = pytest.MonkeyPatch
SEEDS = range(60)
"""Without a fault they pass: see ``test_random_scripts_reach_every_finish_reason_preemptions_and_handoffs``."""


def first_failure(windows: Windows = (FULL,)) -> str:
    for seed in SEEDS:
        try:
            play(seed, windows=windows)
        except AssertionError as broken:
            return str(broken)
    return ""


def check_found(fault: Callable[[Patch], None], expected: str, patch: Patch, windows: Windows = (FULL,)) -> None:
    patch.setattr(machine, "MEMORY", {})  # a fault may change the expected output too
    fault(patch)
    message = first_failure(windows)
    assert re.search(expected, message), f"found by: {message or 'nothing'}"
