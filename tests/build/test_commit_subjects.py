import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / ".ci" / "commit_subjects.py"
IDENTITY = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]


def commit(repository: Path, subject: str, date: str) -> None:
    command = ["git", *IDENTITY, "commit", "--quiet", "--allow-empty", "--message", subject, "--date", date]
    subprocess.run(command, cwd=repository, check=True)


def check(repository: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, str(CHECK), str(repository)], capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def test_a_subject_of_72_characters_passes_and_a_longer_one_is_named(repository: Path) -> None:
    commit(repository, "x" * 72, "2026-11-25T00:00:00Z")
    assert check(repository)[0] == 0
    commit(repository, "y" * 73, "2026-11-25T00:00:01Z")
    code, output = check(repository)
    assert code == 1
    assert "73 characters" in output
    assert "x" * 72 not in output


def test_older_commits_are_left_alone_also_on_a_detached_head(repository: Path) -> None:
    commit(repository, "z" * 90, "2026-11-23T00:00:00Z")
    subprocess.run(["git", "checkout", "--quiet", "--detach"], cwd=repository, check=True)
    assert check(repository)[0] == 0


def test_a_folder_without_history_passes_and_says_so(tmp_path: Path) -> None:
    code, output = check(tmp_path)
    assert code == 0
    assert "not checked" in output
