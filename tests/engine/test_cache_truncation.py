from __future__ import annotations

import pytest

from decant.engine.engine import Engine
from decant.engine.sequence import Sequence
from tests.engine.factories import BLOCK, OutputLog, make_engine, make_request, step_until


def num_cached_tokens(engine: Engine, tokens: list[int], salt: bytes = b"") -> int:
    request = make_request("look", tokens, salt=salt)
    hashes = Sequence(request, (0.0, 0), 0.0).hashes(range(len(tokens) // BLOCK), BLOCK)
    return BLOCK * engine.pool.index.longest_prefix(hashes).num_blocks


@pytest.mark.parametrize("keep", range(6, 40))
def test_kept_tokens_are_cached_and_those_behind_are_not(keep: int) -> None:
    engine, log, request = make_engine(), OutputLog(), make_request("a", 6, 60)
    engine.add(request)
    step_until(engine, lambda: len(log["a"].tokens) >= 38, log)
    tokens = [*request.token_ids, *log["a"].text]
    assert engine.cancel("a", keep)
    log.record(engine.step())
    assert num_cached_tokens(engine, tokens) == keep // BLOCK * BLOCK
    engine.check_integrity()


@pytest.mark.parametrize("way", ["ended", "cancelled", "preempted"])
def test_an_output_is_cached_once_its_sequence_ends_and_its_prompt_before(way: str) -> None:
    engine, log, request = make_engine(), OutputLog(), make_request("a", 2 * BLOCK, 5 * BLOCK)
    engine.add(request)
    step_until(engine, lambda: len(log["a"].tokens) >= 5 * BLOCK - 1, log)
    tokens = [*request.token_ids, *log["a"].text]
    assert num_cached_tokens(engine, tokens) == 2 * BLOCK
    (sequence,) = engine.scheduler.running
    if way == "ended":
        step_until(engine, lambda: log["a"].ended is not None, log)
    elif way == "cancelled":
        engine.cancel("a")
    else:
        engine.scheduler._preempt(sequence)
    assert num_cached_tokens(engine, tokens) == 6 * BLOCK
    engine.check_integrity()
    if way == "preempted":
        assert engine.step().num_tokens == BLOCK - 1, "only what no block holds is computed again"


def test_held_blocks_are_not_evicted() -> None:
    engine, log, request = make_engine(), OutputLog(), make_request("a", 6, 60)
    engine.add(request)
    step_until(engine, lambda: len(log["a"].tokens) >= 20, log)
    tokens = [*request.token_ids, *log["a"].text]
    engine.add(make_request("b", tokens, 8))
    step_until(engine, lambda: log["b"].started is not None, log)
    engine.cancel("a", 8)
    assert num_cached_tokens(engine, tokens) >= len(tokens) // BLOCK * BLOCK
    engine.cancel("b")
    log.record(engine.step())
    engine.evict_cached(tokens, b"", 8)
    assert num_cached_tokens(engine, tokens) == 8
    engine.check_integrity()


def test_without_keep_everything_stays_cached() -> None:
    engine, log, request = make_engine(), OutputLog(), make_request("a", 6, 60)
    engine.add(request)
    step_until(engine, lambda: len(log["a"].tokens) >= 20, log)
    tokens = [*request.token_ids, *log["a"].text]
    engine.cancel("a")
    assert num_cached_tokens(engine, tokens) >= (len(tokens) - 1) // BLOCK * BLOCK
