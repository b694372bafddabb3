"""Arrivals and lengths of recorded requests, as JSON lines or CSV; a time is in seconds or ISO 8601.

Columns are arrival_s, prompt_tokens and output_tokens, or have the names of Azure's LLM inference traces or of datasets
of `decant bench`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from decant.plan.errors import InvalidPlan

_ARRIVAL = ("arrival_s", "TIMESTAMP", "timestamp")
_PROMPT = ("prompt_tokens", "ContextTokens", "prompt_token_ids")
_OUTPUT = ("output_tokens", "GeneratedTokens", "output_len")


class TraceRequest(NamedTuple):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Recorded lengths; `values` are sorted."""

    values: tuple[int, ...]

    @property
    def low(self) -> int:
        return self.values[0]

    @property
    def high(self) -> int:
        return self.values[-1]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def mean_square(self) -> float:
        return sum(value * value for value in self.values) / len(self.values)

    def mean_of(self, function: Callable[[float], float]) -> float:
        return sum(map(function, self.values)) / len(self.values)

    def quantile(self, share: float) -> int:
        return self.values[int(share * len(self.values))]

    def draw(self, rng: Random) -> int:
        return rng.choice(self.values)

    def __str__(self) -> str:
        return f"{self.low:,} to {self.high:,}"


@dataclass(frozen=True, slots=True)
class Trace:
    """At least two requests in order of arrival, not all at once; arrivals count from the first."""

    requests: tuple[TraceRequest, ...]

    @property
    def rate(self) -> float:
        return (len(self.requests) - 1) / self.requests[-1].arrival_s

    @property
    def longest(self) -> int:
        return max(request.prompt_tokens + request.output_tokens for request in self.requests)

    @property
    def prompt(self) -> RecordedLengths:
        return RecordedLengths(tuple(sorted(request.prompt_tokens for request in self.requests)))

    @property
    def output(self) -> RecordedLengths:
        return RecordedLengths(tuple(sorted(request.output_tokens for request in self.requests)))


def read(path: Path) -> Trace:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlan("--trace", f"a readable file of JSON lines or CSV ({error})", path) from None
    rows = _json_rows(text) if text.lstrip().startswith("{") else _csv_rows(text)
    absolute = sorted(
        TraceRequest(_seconds(line, row), _tokens(line, row, _PROMPT), _tokens(line, row, _OUTPUT))
        for line, row in rows
    )
    if len(absolute) < 2 or absolute[-1].arrival_s == absolute[0].arrival_s:
        raise InvalidPlan("--trace", "at least two requests, at different times", f"{len(absolute)} in {path}")
    first = absolute[0].arrival_s
    return Trace(tuple(request._replace(arrival_s=request.arrival_s - first) for request in absolute))


def _json_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidPlan(f"--trace line {number}", f"a JSON object ({error})", line[:40]) from None
            if not isinstance(row, dict):
                raise InvalidPlan(f"--trace line {number}", "a JSON object", line[:40])
            yield number, row


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(text.splitlines())
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise InvalidPlan(f"--trace line {reader.line_num + 1}", f"a line of CSV ({error})", "another") from None


def _column(line: int, row: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    for name in names:
        if row.get(name) is not None:
            return f"--trace line {line}: {name}", row[name]
    raise InvalidPlan(f"--trace line {line}", f"one of {', '.join(names)}", ", ".join(map(str, row)) or "nothing")


def _seconds(line: int, row: Mapping[str, Any]) -> float:
    field, value = _column(line, row, _ARRIVAL)
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        seconds = _timestamp(field, value)
    if not math.isfinite(seconds):
        raise InvalidPlan(field, "finite seconds", value)
    return seconds


def _timestamp(field: str, value: object) -> float:
    try:
        moment = datetime.fromisoformat(str(value).strip())
    except ValueError:
        raise InvalidPlan(field, "seconds, or a date and time in ISO 8601", value) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(line: int, row: Mapping[str, Any], names: tuple[str, ...]) -> int:
    field, value = _column(line, row, names)
    if isinstance(value, list):
        value = len(value)
    try:
        count = 0 if isinstance(value, float | bool) else int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1:
        raise InvalidPlan(field, "a whole number of tokens from 1", value)
    return count
