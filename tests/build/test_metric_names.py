from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from docs.generate.metrics import all_metrics

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "deploy")
SUFFIXES = {".md", ".yaml", ".yml", ".json"}
NAME = re.compile(r"\bdecant_[a-z0-9_]+")


def series_names() -> set[str]:
    names = set()
    for metric in all_metrics():
        parts = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ()
        names |= {metric.name, *(metric.name + part for part in parts)}
    return names


def files() -> Iterator[Path]:
    yield ROOT / "README.md"
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def test_only_metrics_that_exist_are_named() -> None:
    known = series_names()
    unknown = {
        (str(path.relative_to(ROOT)), name)
        for path in files()
        if "node_modules" not in path.parts
        for name in NAME.findall(path.read_text())
        if name not in known
    }
    assert not unknown
    assert "decant_time_to_first_token_seconds_bucket" in known
