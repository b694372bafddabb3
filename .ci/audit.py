"""Compare the versions of requirements.lock with PyPI's records of vulnerabilities: python .ci/audit.py [LOCK].

Prints each vulnerability, and the packages without a record, which are not audited. Ends with 0 if every package was
audited and none has a known vulnerability, with 1 if one has, and with 2 if packages were not audited. Mirrors of PyPI
often have packages without records: then one request says so, and pip-audit is not asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.request import urlopen

RECORD = "https://pypi.org/pypi/{}/{}/json"
TIMEOUT_S = 30
AUDIT = (sys.executable, "-m", "uv", "tool", "run", "pip-audit", "--no-deps", "--disable-pip", "--format", "json")
QUIET = ("--progress-spinner", "off", "--requirement")


def locked(text: str) -> list[tuple[str, str]]:
    """Names and versions of a requirements file whose requirements are all pinned."""
    return re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;]+)", text, re.MULTILINE)


def missing_records(name: str, version: str) -> str | None:
    """Say why the record of a package can't be read here; None if it can."""
    url = RECORD.format(name, version)
    try:
        with urlopen(url, timeout=TIMEOUT_S):
            return None
    except OSError as error:
        return f"{url}: {error}"


def report(dependencies: Sequence[Mapping[str, Any]]) -> int:
    """Print the audit's outcome and return the exit status."""
    for one in dependencies:
        for found in one.get("vulns", ()):
            fixed = ", ".join(found["fix_versions"]) or "no version yet"
            print(f"{one['name']} {one['version']}: {found['id']}, fixed in {fixed}")
    vulnerable = sum(bool(one.get("vulns")) for one in dependencies)
    skipped = [f"  {one['name']}: {one['skip_reason']}" for one in dependencies if "skip_reason" in one]
    audited = len(dependencies) - len(skipped)
    print(f"{audited} of {len(dependencies)} packages audited, {vulnerable} with a known vulnerability")
    if skipped:
        print("not audited:", *skipped, sep="\n")
    return 1 if vulnerable else 2 if skipped or not dependencies else 0


def main(lock: str = "requirements.lock") -> int:
    with open(lock, encoding="utf-8") as file:
        packages = locked(file.read())
    if (missing := missing_records(*packages[0])) is not None:
        print(f"0 of {len(packages)} packages audited: the records of vulnerabilities can't be read here\n  {missing}")
        return 2
    done = subprocess.run([*AUDIT, *QUIET, lock], stdout=subprocess.PIPE, text=True, check=False)
    try:
        return report(json.loads(done.stdout)["dependencies"])
    except ValueError:
        print(f"0 of {len(packages)} packages audited: pip-audit ended with {done.returncode}, see above")
        return 2


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
