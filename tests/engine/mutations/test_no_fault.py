from __future__ import annotations

import pytest

from tests.engine.mutations.harness import first_failure

pytestmark = pytest.mark.slow


def test_without_a_fault_every_script_passes() -> None:
    assert first_failure() == ""
