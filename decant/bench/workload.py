"""Requests of a benchmark: random tokens with forced lengths, or conversations of a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from decant.bench import workload_file
from decant.bench.errors import InvalidBenchmark
from decant.bench.lengths import Exponential, Lengths, Uniform

ANYSCALE = (Uniform(512, 512), Exponential(128, 1536))
"""Prompts and outputs of Anyscale's comparison of continuous with static batching."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A prompt, its forced output length, and its arrival in seconds of a trace (0 where there is none)."""

    prompt: Sequence[int] | str
    output_len: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Each prompt starts with one of `count` prefixes of `tokens` tokens, in addition to its own length."""

    tokens: int = 0
    count: int = 1


def random_requests(
    count: int, vocab_size: int, lengths: tuple[Lengths, Lengths], prefix: SharedPrefix, seed: int
) -> list[BenchRequest]:
    """`count` requests; `lengths` are those of prompts and outputs."""
    rng = Random(seed)
    prefixes = [_tokens(rng, vocab_size, prefix.tokens) for _ in range(prefix.count)]
    prompts, outputs = lengths
    return [
        BenchRequest(rng.choice(prefixes) + _tokens(rng, vocab_size, prompts.draw(rng)), outputs.draw(rng))
        for _ in range(count)
    ]


def _tokens(rng: Random, vocab_size: int, count: int) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def read_trace(path: Path, vocab_size: int | None, context_length: int | None) -> list[BenchRequest]:
    """Requests of a file of JSON lines, in order of arrival. Raises InvalidBenchmark."""
    try:
        items = workload_file.read(path)
        workload_file.check(items, vocab_size, context_length)
    except (workload_file.InvalidWorkload, OSError, UnicodeDecodeError) as error:
        raise InvalidBenchmark("--dataset", f"a file of JSON lines ({error})", path) from None
    items.sort(key=lambda item: item.arrival_s)
    return [BenchRequest(item.prompt_token_ids, item.output_len, item.arrival_s) for item in items]


def read_sharegpt(path: Path) -> list[tuple[str, str]]:
    """First question and answer of each conversation of a file in ShareGPT's format; conversations that do not begin
    with both are left out. Raises InvalidBenchmark."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidBenchmark("--dataset", f"a JSON list of conversations ({error})", path) from None
    if not isinstance(document, list):
        raise InvalidBenchmark("--dataset", "a JSON list of conversations", type(document).__name__)
    pairs = [pair for entry in document if (pair := _first_turns(entry))]
    if not pairs:
        raise InvalidBenchmark("--dataset", "conversations that begin with a question and an answer", "none")
    return pairs


def _first_turns(entry: Any) -> tuple[str, str] | None:
    turns = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    roles = [turn.get("from") for turn in turns[:2]]
    question, answer = (turn.get("value") for turn in turns[:2])
    is_pair = roles[0] in ("human", "user") and roles[1] in ("gpt", "assistant")
    if not is_pair or not isinstance(question, str) or not isinstance(answer, str) or not question or not answer:
        return None
    return question, answer
