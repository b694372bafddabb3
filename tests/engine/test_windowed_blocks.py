"""Blocks of a model whose layers all see a window: freed behind it, and the output stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.kv_layout import FULL, Kind, Window, widest
from tests.engine.factories import (
    BLOCK,
    export_sequence,
    import_sequence,
    make_device,
    make_engine,
    make_request,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.state_machine import WINDOWS, play

SLIDING, CHUNKED = Window(Kind.SLIDING, 10), Window(Kind.CHUNKED, 12)
HELD_AT_ONCE = 5  # blocks of BLOCK tokens: a window of 10, and two more


def windowed_engine(window: Window = SLIDING, num_blocks: int = 64, budget: int = BLOCK) -> Engine:
    device = make_device(num_blocks)
    device.window = window
    engine = make_engine(device=device, budget=budget)
    engine.limits = engine.scheduler.limits = replace(engine.limits, context_length=device.context_length)
    return engine


@pytest.mark.parametrize("window", [SLIDING, CHUNKED])
def test_a_long_sequence_holds_a_window_of_blocks(window: Window) -> None:
    request = make_request(tokens=60, max_tokens=24)
    engine = windowed_engine(window, num_blocks=HELD_AT_ONCE + 1)
    engine.add(request)
    most, log = 0, None
    while engine.has_work:
        log = step_until(engine, lambda: True) if log is None else log
        log.record(engine.step())
        engine.check_integrity()
        most = max(most, engine.blocks_of(["a"]))
    device = make_device()
    device.window = window
    assert log is not None
    assert log["a"].text == recompute_each_step(device, request, 96).text
    assert 0 < most <= HELD_AT_ONCE


def test_a_full_model_frees_nothing_before_the_end() -> None:
    engine = windowed_engine(FULL)
    engine.add(make_request(tokens=40, max_tokens=24))
    step_until(engine, lambda: engine.sequences["a"].num_output == 8)
    assert engine.blocks_of(["a"]) == 12


def test_a_prefix_hit_needs_the_last_window_only() -> None:
    engine = windowed_engine(num_blocks=16)
    first = run(engine, make_request("a", tokens=48, max_tokens=2))
    filler = tuple(range(300, 340))
    run(engine, make_request("b", tokens=filler, max_tokens=2), log=first)  # evicts the oldest blocks
    request = make_request("c", tokens=48, max_tokens=2)
    digests = engine.new_sequence(request).hashes(range(11), BLOCK)
    assert not engine.pool.match(digests), "the first block is evicted"
    run(engine, request, log=first)
    begun = first["c"].begun
    assert begun is not None
    assert begun.cached == 44
    assert first["c"].text == first["a"].text


def test_a_handoff_sends_the_last_window_only() -> None:
    sender, receiver = windowed_engine(), windowed_engine()
    request = make_request("a", tokens=60, max_tokens=12, park_after=1)
    sender.add(request)
    log = step_until(sender, lambda: "a" in sender.parked)
    payload = export_sequence(sender, "a")
    assert [index for index, _, _ in payload.runs] == [12, 13, 14]
    import_sequence(receiver, request, payload)
    assert receiver.blocks_of(["a"]) == 4
    run(receiver, log=log)
    device = make_device()
    device.window = SLIDING
    assert log["a"].text == recompute_each_step(device, replace(request, park_after=None), 96).text
    for engine in (sender, receiver):
        engine.check_integrity()
        assert engine.load().held_blocks == 0


@pytest.mark.parametrize("window", WINDOWS[1:])
@pytest.mark.parametrize("seed", range(12))
def test_random_scripts_over_a_window(seed: int, window: Window) -> None:
    play(seed, forks=seed % 3 == 0, window=window)


def test_the_widest_window_covers_all_layers() -> None:
    narrow = Window(Kind.SLIDING, 4)
    assert widest([narrow, SLIDING, narrow]) == SLIDING
    assert widest([CHUNKED, CHUNKED]) == CHUNKED
    assert widest([SLIDING, FULL]) == widest([SLIDING, CHUNKED]) == widest([CHUNKED, Window(Kind.CHUNKED, 8)]) == FULL
