"""The JSON Schema Test Suite, from the source distribution of jsonschema, which carries it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

DRAFTS = ("draft2020-12", "draft-next", "draft2019-09", "draft7", "draft6", "draft4", "draft3")
"""Folders of the suite. Each schema is taken in the meaning of draft 2020-12."""


class NoPackageIndex(Exception):
    pass


def schemas(folder: Path) -> dict[str, Any]:
    """Distinct schemas by file and description; ``folder`` keeps the download. Raises NoPackageIndex."""
    if not list(folder.glob("*.tar.gz")):
        # pip builds the metadata of a source distribution: with ":all:" it would compile what it builds with, too.
        source = ["jsonschema==4.26.0", "--no-deps", "--no-binary", "jsonschema"]
        command = [sys.executable, "-m", "pip", "download", *source]
        done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, timeout=600)
        if not list(folder.glob("*.tar.gz")):
            raise NoPackageIndex(f"the package index can't be reached: {done.stderr[-200:]}")
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        return dict(_schemas(files))


def _schemas(files: tarfile.TarFile) -> Iterator[tuple[str, Any]]:
    known = set()
    for member in sorted(
        files.getmembers(), key=lambda member: [draft in member.name for draft in DRAFTS], reverse=True
    ):
        match = re.search(r"/json/tests/([^/]+)/(.+)\.json$", member.name)
        if match is None or match[1] not in DRAFTS:
            continue
        content = files.extractfile(member)
        assert content is not None
        for group in json.load(content):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema.pop("$schema", None)
            text = json.dumps(schema)
            if text not in known:
                known.add(text)
                yield f"{match[1]}/{match[2]}: {group['description']}", schema


def is_valid(schema: Any, answer: str) -> bool:
    """Whether an answer validates, its numbers as floats or as decimals: in floats 999.012 is no multiple of 0.0001."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    try:
        return _validates(schema, json.loads(answer)) or _validates(exact, json.loads(answer, parse_float=Decimal))
    except json.JSONDecodeError:
        return False
    except re.error:  # a pattern that Python's expressions lack
        return True


def _validates(schema: Any, value: Any) -> bool:
    return bool(Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value))
