from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from decant.bench.counts import parse_counts
from decant.bench.errors import InvalidBenchmark

MAX_STEP_MS = 60_000
"""Step time that no step reaches."""
MAX_RUNNING = 256

SPLIT, UNCHUNKED, BY_TIME = "split", "mixed, unchunked", "mixed, chunks by predicted time"


@dataclass(frozen=True)
class Configuration:
    name: str
    prefill: int
    decode: int
    variables: Mapping[str, str] = field(default_factory=dict)
    chunk: int | None = None

    @property
    def is_mixed(self) -> bool:
        return not self.prefill


@dataclass(frozen=True)
class InterferenceOptions:
    """Options of `decant bench interference`; `chunks` are in ascending order."""

    running: int = 8
    prompt_tokens: int = 1500
    chunks: Sequence[int] = (64, 128, 256, 512, 1024, 2048)
    prefill: int = 1
    decode: int = 1
    trials: int = 3
    timeout: float = 600.0
    seed: int = 0


def parse_chunks(text: str) -> tuple[int, ...]:
    return parse_counts("--chunks", text, 1)


def configurations(options: InterferenceOptions) -> list[Configuration]:
    whole = options.prompt_tokens + options.running
    least = options.running + 1
    if options.chunks[0] < least:
        raise InvalidBenchmark("--chunks", f"at least {least} for {options.running} running answers", options.chunks[0])
    chunks = [chunk for chunk in options.chunks if chunk < whole]
    return [
        _mixed(UNCHUNKED, max(whole, MAX_RUNNING), None),
        *(_mixed(f"mixed, chunks of {chunk:,}", chunk, chunk) for chunk in chunks),
        Configuration(BY_TIME, 0, 1),
        # Shorter prompts, those of the running answers, are computed where they decode.
        Configuration(
            SPLIT, options.prefill, options.decode, {"DECANT_HANDOFF_MIN_TOKENS": str(options.prompt_tokens // 2)}
        ),
    ]


def _mixed(name: str, token_budget: int, chunk: int | None) -> Configuration:
    variables = {
        "DECANT_TOKEN_BUDGET": str(token_budget),
        "DECANT_MAX_RUNNING": str(min(MAX_RUNNING, token_budget)),
        "DECANT_STEP_MS": str(MAX_STEP_MS),
    }
    return Configuration(name, 0, 1, variables, chunk)
