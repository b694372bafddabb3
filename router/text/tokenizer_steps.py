from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat_steps(described: Any, key: str) -> Iterator[Mapping[str, Any]]:
    """Steps of a part of tokenizer.json in order, without its nested sequences, which list theirs under ``key``."""
    if described is None:
        return
    if described["type"] == "Sequence":
        for step in described[key]:
            yield from flat_steps(step, key)
    else:
        yield described
