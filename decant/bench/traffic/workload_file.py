"""Workload as JSON lines: {"id", "prompt_token_ids", "output_len", "arrival_s"}.

Lengths are forced; arrival is in seconds after the start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


class Item(NamedTuple):
    id: str
    prompt_token_ids: list[int]
    output_len: int
    arrival_s: float


class InvalidWorkload(ValueError):
    def __init__(self, line: int, field: str, limit: str, value: object) -> None:
        text = repr(value)
        super().__init__(f"line {line}: {field}: {limit}, got {text if len(text) <= 80 else text[:77] + '...'}")
        self.line = line
        self.field = field
        self.limit = limit
        self.value = value


def write(items: Iterable[Item], path: Path) -> None:
    path.write_text("".join(json.dumps(item._asdict(), separators=(",", ":")) + "\n" for item in items))


def read(path: Path, vocab_size: int | None = None, context_length: int | None = None) -> list[Item]:
    """Read a workload. Raises InvalidWorkload, OSError, UnicodeDecodeError."""
    items: list[Item] = []
    seen: set[str] = set()
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                item = _parse(number, line)
                _require(item.id not in seen, number, "id", "different on every line", item.id)
                _check(number, item, vocab_size, context_length)
                items.append(item)
                seen.add(item.id)
    _require(bool(items), 1, "file", "at least one request", "none")
    return items


def check(items: Iterable[Item], vocab_size: int | None, context_length: int | None) -> None:
    """Raise InvalidWorkload for a token or a length beyond a limit; None is no limit."""
    for number, item in enumerate(items, start=1):
        _check(number, item, vocab_size, context_length)


def _check(number: int, item: Item, vocab_size: int | None, context_length: int | None) -> None:
    length, worst = len(item.prompt_token_ids) + item.output_len, max(item.prompt_token_ids)
    if vocab_size is not None:
        _require(worst < vocab_size, number, "prompt_token_ids", f"token ids below {vocab_size}", worst)
    if context_length is not None:
        _require(
            length <= context_length, number, "output_len", f"at most {context_length} tokens with the prompt", length
        )


def _parse(number: int, line: str) -> Item:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidWorkload(number, "line", f"a JSON object ({getattr(error, 'msg', error)})", line) from None
    _require(isinstance(raw, dict), number, "line", "a JSON object", raw)
    for field in Item._fields:
        _require(field in raw, number, field, "present", "nothing")
    for field in raw:
        _require(field in Item._fields, number, field, f"one of {', '.join(Item._fields)}", field)
    item = Item(**raw)
    _require(isinstance(item.id, str) and bool(item.id), number, "id", "a string that is not empty", item.id)
    tokens = item.prompt_token_ids
    _require(isinstance(tokens, list) and bool(tokens), number, "prompt_token_ids", "a list that is not empty", tokens)
    for token in tokens:
        _require(_is_integer(token) and token >= 0, number, "prompt_token_ids", "whole numbers from 0", token)
    written, arrival = item.output_len, item.arrival_s
    _require(_is_integer(written) and written >= 1, number, "output_len", "a whole number from 1", written)
    timed = (_is_integer(arrival) or isinstance(arrival, float)) and 0 <= arrival <= sys.float_info.max
    _require(timed, number, "arrival_s", "a number of seconds from 0", arrival)
    return item


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(holds: bool, line: int, field: str, limit: str, value: object) -> None:
    if not holds:
        raise InvalidWorkload(line, field, limit, value)
