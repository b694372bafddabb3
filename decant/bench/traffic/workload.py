from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from decant.bench.errors import InvalidBenchmark
from decant.bench.traffic import workload_file
from decant.bench.traffic.lengths import Exponential, Lengths, Uniform

ANYSCALE = (Uniform(512, 512), Exponential(128, 1536))
"""Lengths in Anyscale's comparison of continuous with static batching."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Request with a forced output length. Each of `follow_ups` is sent when the turn before it has ended."""

    prompt: Sequence[int] | str
    output_len: int
    arrival_s: float = 0.0
    follow_ups: Sequence[BenchRequest] = ()

    @property
    def turns(self) -> int:
        return 1 + len(self.follow_ups)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    tokens: int = 0
    count: int = 1


def random_requests(
    count: int, vocab_size: int, lengths: tuple[Lengths, Lengths], prefix: SharedPrefix, seed: int | str
) -> list[BenchRequest]:
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
    try:
        items = workload_file.read(path, vocab_size, context_length)
    except (workload_file.InvalidWorkload, OSError, UnicodeDecodeError) as error:
        raise InvalidBenchmark("--dataset", f"a file of JSON lines ({error})", path) from None
    items.sort(key=lambda item: item.arrival_s)
    first = items[0].arrival_s  # may be a time of day
    return [BenchRequest(item.prompt_token_ids, item.output_len, item.arrival_s - first) for item in items]


Turns = list[tuple[str, str]]
"""Pairs of question and answer."""


def read_sharegpt(path: Path) -> list[Turns]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidBenchmark("--dataset", f"a JSON list of conversations ({error})", path) from None
    if not isinstance(document, list):
        raise InvalidBenchmark("--dataset", "a JSON list of conversations", type(document).__name__)
    conversations = [turns for entry in document if (turns := _turns(entry))]
    if not conversations:
        raise InvalidBenchmark("--dataset", "conversations that begin with a question and an answer", "none")
    return conversations


def _turns(entry: Any) -> Turns:
    messages = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(messages, list):
        return []
    turns: Turns = []
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        pair = _text(question, ("human", "user")), _text(answer, ("gpt", "assistant"))
        if not all(pair):
            break
        turns.append(pair)
    return turns


def _text(message: Any, roles: tuple[str, ...]) -> str:
    if not isinstance(message, dict) or message.get("from") not in roles:
        return ""
    value = message.get("value")
    return value if isinstance(value, str) and _is_utf8(value) else ""


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prompts(turns: Turns) -> list[str]:
    """Return each question after all earlier ones and their answers in the file."""
    lines = [text for turn in turns for text in turn]
    return ["\n".join(lines[: 2 * index + 1]) for index in range(len(turns))]
