from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("user_program.py")


def mypy(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_strict_program_is_typed_throughout(tmp_path: Path) -> None:
    """Each ``type: ignore`` marks a mistake; mypy reports those that it does not need."""
    (tmp_path / "program.py").write_text(PROGRAM.read_text())
    done = mypy(tmp_path, "program.py")
    assert done.returncode == 0, done.stdout + done.stderr
