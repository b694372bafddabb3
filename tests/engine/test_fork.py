from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest
from decant.engine.plan import StepPlan
from decant.engine.request import FinishReason, Request, SamplingParams, StopParams
from decant.engine.sequence import Sequence as EngineSequence
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    BLOCK,
    OutputLog,
    export_sequence,
    import_sequence,
    make_engine,
    make_request,
    prompt,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone

GREEDY = make_request("output-0", 10, stop=StopParams(max_tokens=16, ignore_eos=True))
RANDOM = replace(
    GREEDY, sampling=SamplingParams(temperature=1.3, seed=7, frequency_penalty=0.5, repetition_penalty=1.2), logprobs=1
)


def engine_of(make: MakeDevice, num_blocks: int = 64, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


def outputs_of(request: Request, number: int = 3, prior: tuple[tuple[int, ...], ...] = ()) -> list[Request]:
    """One request for each output; output ``i`` continues ``prior[i]``."""
    requests = []
    for index in range(number):
        known = prior[index] if prior else ()
        requests.append(
            replace(
                request,
                id=f"output-{index}",
                token_ids=(*request.token_ids, *known),
                prompt_tokens=request.prompt_len,
                sampling=replace(request.sampling, output_index=index),
            )
        )
    return requests


def add(engine: Engine, requests: list[Request]) -> None:
    engine.add(requests[0], requests[1:])


def expect_each_as_alone(make: MakeDevice, log: OutputLog, requests: list[Request]) -> None:
    for request in requests:
        alone = replace(request, park_after=None)
        same_output_as_alone(log[request.id], recompute_each_step(make(64), alone))


def count_computed(engine: Engine) -> Counter[int]:
    """Count how often each position is computed."""
    computed: Counter[int] = Counter()
    schedule = engine.scheduler.schedule

    def counted(reserved_slots: int = 0) -> tuple[StepPlan, list[EngineSequence]]:
        plan, sequences = schedule(reserved_slots)
        for row in plan.rows:
            computed.update(range(row.start, row.end))
        return plan, sequences

    engine.scheduler.schedule = counted  # type: ignore[method-assign]
    return computed


@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 10])
@pytest.mark.parametrize("request_", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_each_output_is_that_of_a_request_of_its_own(make: MakeDevice, request_: Request, length: int) -> None:
    requests = outputs_of(replace(request_, token_ids=prompt(length)))
    engine = engine_of(make)
    add(engine, requests)
    engine.check_integrity()
    log = run(engine)
    expect_each_as_alone(make, log, requests)
    if request_ is RANDOM:
        assert len({tuple(log[request.id].text) for request in requests}) == 3
    nothing_is_held(engine)


def test_the_prompt_is_computed_once_but_for_its_last_token(make: MakeDevice) -> None:
    engine = engine_of(make)
    computed = count_computed(engine)
    add(engine, outputs_of(RANDOM, 4))
    run(engine)
    assert [computed[position] for position in range(10)] == [1] * 9 + [4]


def test_full_blocks_are_shared_and_a_partial_one_is_copied(make: MakeDevice) -> None:
    engine = engine_of(make)
    requests = outputs_of(replace(GREEDY, token_ids=prompt(3 * BLOCK + 3)), 2)
    add(engine, requests)
    log = step_until(engine, lambda: all(engine.sequences[each.id].num_output == 1 for each in requests))
    first, second = (engine.sequences[each.id].block_table for each in requests)
    assert first is not None
    assert second is not None
    assert list(first.blocks[0][:3]) == list(second.blocks[0][:3])
    assert not set(first.blocks[0][3:]) & set(second.blocks[0][3:])
    counts = Counter(block for blocks in engine.pool.held_by().values() for block in blocks)
    assert sorted(counts.values()) == [1, 1, 2, 2, 2]
    assert engine.blocks_of(each.id for each in requests) == engine.load().held_blocks == 5
    one, other = (engine.device.read(table.blocks[0][3]) for table in (first, second))
    assert bytes(one) == bytes(other)
    engine.cancel("output-0")
    engine.check_integrity()
    expected = recompute_each_step(make(64), requests[1]).text
    assert run(engine, log=log)["output-1"].text == expected, "an output does not need the first"
    nothing_is_held(engine)


def test_outputs_continue_their_own_tokens_of_earlier_attempts(make: MakeDevice) -> None:
    prior = tuple(
        tuple(recompute_each_step(make(64), each).text[:count])
        for each, count in zip(outputs_of(RANDOM), (0, 5, 2), strict=True)
    )
    requests = outputs_of(RANDOM, prior=prior)
    engine = engine_of(make)
    add(engine, requests)
    expect_each_as_alone(make, run(engine), requests)
    nothing_is_held(engine)


def test_no_output_starts_before_there_are_blocks_and_slots_for_all(make: MakeDevice) -> None:
    engine, log = engine_of(make, num_blocks=8, max_running=4, context_length=32), OutputLog()
    engine.add(make_request("other", prompt(4 * BLOCK - 1, 2), 3))
    log.record(engine.step())
    add(engine, outputs_of(replace(GREEDY, token_ids=prompt(2 * BLOCK + 1), stop=StopParams(max_tokens=2)), 3))
    log.record(engine.step())
    assert {each.id for each in engine.scheduler.waiting} == {"output-0"}, "three blocks are left, and five are needed"
    run(engine, log=log)
    assert not engine.load().preemptions
    assert {log[f"output-{index}"].reason for index in range(3)} == {FinishReason.LENGTH}
    nothing_is_held(engine)


@pytest.mark.parametrize(("blocks", "running"), [(8, 4), (64, 2)])
def test_more_outputs_than_ever_fit_are_refused_with_the_number_that_does(
    make: MakeDevice, blocks: int, running: int
) -> None:
    engine = engine_of(make, num_blocks=blocks, max_running=running, context_length=32)
    request = replace(GREEDY, token_ids=prompt(5 * BLOCK))
    most = min(running, 3)
    with pytest.raises(InvalidRequest, match=f"n: at most {most},.* got {most + 1}"):
        add(engine, outputs_of(request, most + 1))
    engine.check_integrity()
    assert not engine.sequences
    add(engine, outputs_of(request, most))
    run(engine)
    nothing_is_held(engine)


def test_outputs_that_preempt_each_other_stay_the_same(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=12, context_length=48)
    requests = outputs_of(RANDOM, 4)
    add(engine, requests)
    expect_each_as_alone(make, run(engine), requests)
    assert engine.load().preemptions
    nothing_is_held(engine)


@pytest.mark.parametrize("cancelled", [0, 1])
def test_a_cancel_before_the_fork_ends_an_output_and_that_of_the_first_ends_all(
    make: MakeDevice, cancelled: int
) -> None:
    engine, log = engine_of(make, budget=4, max_running=4), OutputLog()
    requests = outputs_of(GREEDY)
    add(engine, requests)
    log.record(engine.step())
    assert engine.sequences["output-0"].num_computed == 4
    engine.cancel(f"output-{cancelled}")
    engine.check_integrity()
    run(engine, log=log)
    reasons = [log[each.id].reason for each in requests]
    ended = FinishReason.CANCELLED, FinishReason.LENGTH
    assert reasons == ([ended[0]] * 3 if cancelled == 0 else [ended[1], ended[0], ended[1]])
    nothing_is_held(engine)


@pytest.mark.parametrize("ended", [(), (0,), (1,), (0, 2)], ids=str)
@pytest.mark.parametrize("length", [BLOCK, 10])
def test_one_transfer_moves_all_outputs_whichever_ended_with_their_first_token(
    make: MakeDevice, ended: tuple[int, ...], length: int
) -> None:
    requests = [replace(each, park_after=1) for each in outputs_of(replace(RANDOM, token_ids=prompt(length)))]
    for index in ended:
        requests[index] = replace(requests[index], stop=StopParams(max_tokens=1, ignore_eos=True))
    sender, receiver = engine_of(make), engine_of(make)
    add(sender, requests)
    log = run(sender)
    held = sender.load().held_blocks
    payload = export_sequence(sender, "output-0", siblings=[each.id for each in requests[1:]])
    assert held
    assert [each.output for each in payload.commit.outputs] == [i for i in range(3) if i not in ended]
    nothing_is_held(sender)
    computed = count_computed(receiver)
    import_sequence(receiver, requests[0], payload, requests[1:])
    receiver.check_integrity()
    run(receiver, log=log)
    assert not any(computed[position] for position in range(length)), "the prompt is not computed again"
    expect_each_as_alone(make, log, requests)
    nothing_is_held(receiver)


def test_running_outputs_move_together(make: MakeDevice) -> None:
    sender, receiver, log = engine_of(make), engine_of(make), OutputLog()
    requests = outputs_of(RANDOM)
    add(sender, requests)
    step_until(sender, lambda: len(log["output-0"].text) == 6, log)
    arrival = receiver.transfers.reserve(requests[0], requests[1:])
    export = sender.transfers.export("output-0")
    commit = sender.transfers.finalize_running("output-0", sent=len(export.blocks))
    assert commit is not None
    assert [len(output.tokens) for output in commit.outputs] == [6, 6, 6]
    arrival.extend(commit.computed + 1)
    for block in export.blocks:
        arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release("output-0")
    nothing_is_held(sender)
    expect_each_as_alone(make, run(receiver, log=log), requests)
    nothing_is_held(receiver)


def test_outputs_whose_transfer_is_given_up_go_on(make: MakeDevice) -> None:
    engine, log = engine_of(make), OutputLog()
    requests = outputs_of(RANDOM)
    add(engine, requests)
    step_until(engine, lambda: len(log["output-0"].text) == 6, log)
    export = engine.transfers.export("output-0")
    assert engine.transfers.finalize_running("output-0", sent=len(export.blocks)) is not None
    assert len(engine.parked) == 3
    engine.transfers.cancel("output-0")
    expect_each_as_alone(make, run(engine, log=log), requests)
    nothing_is_held(engine)
