"""What `make audit` says, on answers of pip-audit and of PyPI."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import URLError

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}
SKIPPED = {"name": "c", "skip_reason": "c (4) has no record"}


@pytest.fixture
def audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_package_of_the_lock_is_audited(audit: ModuleType) -> None:
    text = (ROOT / "requirements.lock").read_text()
    required = [line for line in text.splitlines() if line and not line.startswith(("#", " ", "-"))]
    assert len(audit.locked(text)) == len(required)
    assert audit.locked("uvicorn[standard]==1.2 ; python_version < '4'\n") == [("uvicorn", "1.2")]


@pytest.mark.parametrize(
    ("dependencies", "status", "lines"),
    [
        ([CLEAN], 0, ["1 of 1 packages audited, 0 with a known vulnerability"]),
        (
            [CLEAN, VULNERABLE, SKIPPED],
            1,
            ["b 2: PYSEC-1, fixed in 3", "2 of 3 packages audited, 1 with a known vulnerability", "not audited:"],
        ),
        ([CLEAN, SKIPPED], 2, ["1 of 2 packages audited, 0 with a known vulnerability", "  c: c (4) has no record"]),
        ([], 2, ["0 of 0 packages audited"]),
    ],
)
def test_what_was_not_audited_is_named_and_is_no_success(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], dependencies: list[Any], status: int, lines: list[str]
) -> None:
    assert audit.report(dependencies) == status
    shown = capsys.readouterr().out
    assert all(line in shown for line in lines), shown


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        (json.dumps({"dependencies": [CLEAN], "fixes": []}), 0, "1 of 1 packages audited"),
        ("", 2, "0 of 1 packages audited: pip-audit ended with 1"),
    ],
)
def test_an_audit_that_gives_no_answer_is_no_success(
    audit: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    output: str,
    status: int,
    said: str,
) -> None:
    (tmp_path / "lock").write_text("a==1\n")
    monkeypatch.setattr(audit, "missing_records", lambda *_: None)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, output))
    assert audit.main(str(tmp_path / "lock")) == status
    assert said in capsys.readouterr().out


def test_without_records_one_request_says_that_nothing_was_audited(
    audit: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []

    def refuse(url: str, timeout: float) -> Any:
        asked.append(url)
        raise URLError("unreachable")

    (tmp_path / "lock").write_text("a==1\nb==2\n")
    monkeypatch.setattr(audit, "urlopen", refuse)
    assert audit.main(str(tmp_path / "lock")) == 2
    assert asked == ["https://pypi.org/pypi/a/1/json"]
    assert capsys.readouterr().out.startswith("0 of 2 packages audited: the records of vulnerabilities can't be read")
