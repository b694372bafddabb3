"""Refuse commit subjects of more than 72 characters: python .ci/commit_subjects.py [REPOSITORY].

Looks at the last commits before HEAD, for shallow clones. Older subjects are longer; the date of the author decides,
which a rebase keeps.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime

LONGEST = 72
SINCE = datetime(2026, 11, 24, 6, tzinfo=UTC)
COMMITS = 200


def main(repository: str = ".") -> int:
    command = ["git", "-C", repository, "log", f"-{COMMITS}", "--no-merges", "--format=%h %at %s"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"commit subjects are not checked: {done.stderr.strip()}")
        return 0
    long = []
    for line in done.stdout.splitlines():
        commit, written, subject = line.split(" ", 2)
        if int(written) >= SINCE.timestamp() and len(subject) > LONGEST:
            long.append(f"{commit}: {len(subject)} characters, at most {LONGEST}: {subject}")
    print("\n".join(long) or "commit subjects: all short enough")
    return 1 if long else 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
