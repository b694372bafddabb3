"""Prompts of a simulation: conversations under a few system prompts, and unrelated documents.

system prompt | user | answer | user | answer | user        turn 3 begins with all of turn 2
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from decant.protos import worker_pb2 as wire
from decant.router.placement.prefix_index import PromptBlocks

SYSTEM_PROMPTS = 8
SYSTEM_TOKENS = (400, 1600)
USER_TOKENS = (20, 200)
ANSWER_TOKENS = (50, 400)
TURNS = (2, 8)
THINKING_SECONDS = 10.0
DOCUMENT_TOKENS = (100, 4000)


@dataclass(frozen=True, slots=True)
class Arrival:
    at: float
    tokens: int
    prefix: PromptBlocks


def arrivals(prompts: int, rate: float, shared: float, seed: int) -> list[Arrival]:
    """Arrivals in order, ``rate`` per second on average; a share ``shared`` of the prompts belongs to conversations."""
    rng = Random(seed)
    systems = [_text(rng, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    turns = sum(TURNS) / 2
    begin = {True: rate * shared / turns, False: rate * (1 - shared)}
    made: list[Arrival] = []
    for is_shared, begins in begin.items():
        at, share = 0.0, shared if is_shared else 1 - shared
        left = round(prompts * share)
        while left > 0:
            at += rng.expovariate(begins)
            several = list(_conversation(rng, at, rng.choice(systems)) if is_shared else _document(rng, at))
            made += several[:left]
            left -= len(several)
    return sorted(made, key=lambda arrival: arrival.at)


def _conversation(rng: Random, at: float, system: array[int]) -> Iterator[Arrival]:
    history = system[:]
    for _ in range(rng.randint(*TURNS)):
        history = history + _text(rng, USER_TOKENS)
        yield _arrival(at, history)
        history = history + _text(rng, ANSWER_TOKENS)
        at += rng.expovariate(1 / THINKING_SECONDS)


def _document(rng: Random, at: float) -> Iterator[Arrival]:
    yield _arrival(at, _text(rng, DOCUMENT_TOKENS))


def _arrival(at: float, tokens: array[int]) -> Arrival:
    return Arrival(at, len(tokens), PromptBlocks(wire.EngineRequest(prompt=tokens.tobytes())))


def _text(rng: Random, tokens: tuple[int, int]) -> array[int]:
    return array("I", rng.randbytes(4 * rng.randint(*tokens)))
