from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decant.engine.engine import Engine
from decant.engine.errors import UnknownSequence
from decant.engine.fake import FakeDevice
from decant.engine.plan import StepPlan
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from tests.engine.factories import (
    OutputLog,
    export_sequence,
    import_sequence,
    make_device,
    make_engine,
    make_request,
    prompt,
    run,
    run_alone,
    step_until,
)
from tests.engine.overlap.harness import Overlapping, WatchedOverlapping, make_overlapping
from tests.engine.properties import nothing_is_held, same_output_as_alone
from tests.engine.state_machine import GROUPS, play

EOS = range(0, 512, 9)

PENALTY = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.3)


def overlapping(**more: int) -> tuple[Engine, Overlapping]:
    device = make_overlapping(eos=EOS, **more)
    return make_engine(device=device), device


def requests_from(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        make_request(
            f"r{index}",
            prompt(rng.randint(1, 20), rng.randint(1, 3)),
            sampling=rng.choice([SamplingParams(), SamplingParams(temperature=1.0, seed=index), PENALTY]),
            stop=StopParams(max_tokens=rng.randint(1, 30), min_tokens=rng.randint(0, 1)),
            logprobs=rng.choice([None, 1]),
            prompt_logprobs=rng.choice([None, 0]),
        )
        for index in range(count)
    ]


def cached(engine: Engine) -> set[bytes]:
    return {block_hash for _, block_hash in engine.pool.index.published.values()}


@pytest.mark.slow
@given(seed=st.integers(0, 2**32), count=st.integers(1, 7), budget=st.sampled_from([3, 8, 64]))
@settings(max_examples=60, deadline=None)
def test_overlapped_steps_give_the_output_and_the_cached_blocks_of_single_ones(
    seed: int, count: int, budget: int
) -> None:
    requests = requests_from(seed, count)
    plain = make_engine(device=make_device(eos=EOS), budget=budget)
    device = make_overlapping(eos=EOS, seed=seed)
    engine = make_engine(device=device, budget=budget)
    expected, found = run(plain, *requests), run(engine, *requests)
    for request in requests:
        same_output_as_alone(found[request.id], expected[request.id])
        ended, other = found[request.id].ended, expected[request.id].ended
        assert ended is not None
        assert other is not None
        assert ended.stop_token == other.stop_token
    nothing_is_held(engine)
    assert cached(engine) == cached(plain), "other blocks are cached"


def test_every_step_of_a_steady_batch_is_launched_while_another_is_computed() -> None:
    engine = make_engine(device=(device := make_overlapping()))
    run(engine, *(make_request(f"r{index}", 5, max_tokens=20) for index in range(4)))
    assert device.steps == 20, "the length of the output is known: no step is computed in vain"
    assert device.ahead == device.steps - 1


def test_a_stop_token_is_found_a_step_late_and_its_row_is_dropped() -> None:
    engine, device = overlapping()
    request = make_request("a", 5, max_tokens=None)
    log = run(engine, request)
    same_output_as_alone(log["a"], run_alone(request, lambda: make_engine(device=make_device(eos=EOS))))
    assert log["a"].reason is FinishReason.STOP
    assert device.steps == len(log["a"].tokens) + 1
    nothing_is_held(engine)


def test_blocks_of_an_ended_sequence_are_held_until_the_device_no_longer_writes_to_them() -> None:
    engine, _ = overlapping()
    engine.add(make_request("a", 5, max_tokens=None))
    engine.step()
    held = engine.load().held_blocks
    assert engine.cancel("a")
    engine.check_integrity()
    assert engine.load().held_blocks == held > 0
    assert engine.has_work
    engine.step()
    nothing_is_held(engine)


def test_a_cancelled_id_can_be_used_again_while_its_last_step_is_computed() -> None:
    engine, _ = overlapping()
    request, log = make_request("a", 5, max_tokens=12, stop=StopParams(12, ignore_eos=True)), OutputLog()
    engine.add(request)
    engine.step()
    engine.cancel("a")
    engine.step()
    log = run(engine, request)
    same_output_as_alone(log["a"], run_alone(request))
    nothing_is_held(engine)


def test_blocks_behind_a_stop_string_are_not_cached_when_the_last_step_ends() -> None:
    engine, _ = overlapping()
    request = make_request("a", 5, stop=StopParams(None, ignore_eos=True))
    engine.add(request)
    step_until(engine, lambda: len(engine.sequences["a"].tokens) >= 18)
    engine.cancel("a", keep=9)
    engine.step()
    nothing_is_held(engine)
    assert engine.load().cached_blocks == 2


def test_a_row_whose_draw_depends_on_its_tokens_waits_for_them() -> None:
    engine, device = overlapping()
    requests = [
        make_request("penalised", 5, sampling=PENALTY, stop=StopParams(10, ignore_eos=True)),
        make_request("plain", 6, stop=StopParams(20, ignore_eos=True)),
    ]
    log = run(engine, *requests)
    for request in requests:
        same_output_as_alone(log[request.id], run_alone(request))
    assert 8 <= device.ahead <= 12, "steps overlap once the penalised row has ended"


@pytest.mark.parametrize("command", ["park", "finalize_running"])
def test_a_command_that_reads_a_sequence_commits_the_step_in_flight(command: str) -> None:
    engine, _ = overlapping()
    request, log = make_request("a", 5, stop=StopParams(16, ignore_eos=True)), OutputLog()
    engine.add(request)
    step_until(engine, lambda: len(engine.sequences["a"].tokens) == 9, log)
    if command == "park":
        engine.park("a")
        assert len(engine.sequences["a"].tokens) == 10
        engine.resume("a")
    else:
        engine.transfers.export("a")
        commit = engine.transfers.finalize_running("a", sent=2)
        assert commit is not None
        assert commit.computed == 9
        assert len(commit.outputs[0].tokens) == 5
        engine.transfers.cancel("a")
    assert len(log["a"].tokens) == 4, "a command emits nothing"
    run(engine, log=log)
    same_output_as_alone(log["a"], run_alone(request))
    nothing_is_held(engine)


def test_a_command_on_a_sequence_that_the_step_in_flight_ends_is_refused() -> None:
    engine, _ = overlapping()
    engine.add(make_request("a", 5, stop=StopParams(3, ignore_eos=True)))
    engine.step()
    engine.step()
    with pytest.raises(UnknownSequence):
        engine.park("a")
    assert [end.reason for end in engine.step().ended] == [FinishReason.LENGTH]
    nothing_is_held(engine)


def test_a_handoff_between_overlapping_engines_keeps_the_output() -> None:
    sender, receiver = overlapping()[0], overlapping(seed=1)[0]
    request = make_request("a", 10, stop=StopParams(20, ignore_eos=True))
    log = run(sender, replace(request, park_after=3))
    import_sequence(receiver, request, export_sequence(sender, "a"))
    run(receiver, log=log)
    same_output_as_alone(log["a"], run_alone(request))
    nothing_is_held(sender)
    nothing_is_held(receiver)


@pytest.mark.slow
@pytest.mark.parametrize("windows", GROUPS, ids=str)
def test_all_actions_in_any_order_keep_output_and_blocks(windows: Any) -> None:
    first = 100 * GROUPS.index(windows)
    ahead = 0
    for seed in range(first, first + 14):
        world = play(seed, forks=seed % 2 == 0, windows=windows, kind=WatchedOverlapping)
        devices: list[Any] = [engine.device for engine in world.engines]
        ahead += sum(device.ahead for device in devices)
    assert ahead > 100, "hardly any step was launched ahead"


def test_a_device_that_drafts_tokens_takes_one_step_at_a_time() -> None:
    device = make_overlapping()
    device.lookahead = 2
    engine = make_engine(device=device)
    run(engine, make_request("a", 5, max_tokens=20))
    assert device.ahead == 0


def test_a_device_that_does_not_overlap_computes_a_step_when_it_is_awaited() -> None:
    device: FakeDevice = make_device()
    computed: list[int] = []

    def cost(plan: StepPlan) -> float:
        computed.append(plan.num_tokens)
        return 0.0

    device._cost = cost
    engine = make_engine(device=device)
    engine.add(make_request("a", 5, max_tokens=4))
    engine.step()
    assert computed == [5]
    assert not engine.step_queue
