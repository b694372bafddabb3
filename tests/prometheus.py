"""Prometheus' programs: of PATH, or of ``make prometheus``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "build" / "prometheus" / "usr" / "bin"


def program(name: str) -> str:
    """Return the path of ``prometheus`` or ``promtool``; skip the test without it."""
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), str(TOOLS))))
    if found is None:
        pytest.skip(f"{name} is not on PATH, and `make prometheus` has not downloaded it")
    return found
