from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from decant.engine.engine import Engine
from decant.engine.errors import InvalidRequest, OutOfBlocks, UnknownSequence
from decant.engine.request import Request, SamplingParams, StopParams
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

GREEDY = make_request("source", 10, stop=StopParams(max_tokens=16, ignore_eos=True))
RANDOM = replace(
    GREEDY, sampling=SamplingParams(temperature=1.3, seed=7, frequency_penalty=0.5, repetition_penalty=1.2), logprobs=1
)


def engine_of(make: MakeDevice, num_blocks: int = 64, **limits: int) -> Engine:
    return make_engine(device=make(num_blocks), **limits)


def forked(make: MakeDevice, request: Request, tokens: int) -> tuple[Engine, OutputLog]:
    engine, log = engine_of(make), OutputLog()
    engine.add(request)
    step_until(engine, lambda: len(log["source"].text) >= tokens, log)
    engine.fork("source", "child", 0)
    engine.check_integrity()
    return engine, run(engine, log=log)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("request_", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_a_fork_of_the_same_output_index_generates_the_same_tokens(
    make: MakeDevice, request_: Request, tokens: int
) -> None:
    engine, log = forked(make, request_, tokens)
    assert log["child"].text == log["source"].text[tokens:]
    assert log["child"].logprobs == log["source"].logprobs[tokens:]
    assert log["child"].tokens[0].position == tokens
    same_output_as_alone(log["source"], recompute_each_step(make(64), request_))
    nothing_is_held(engine)


def test_forks_draw_as_requests_of_their_output_index_would(make: MakeDevice) -> None:
    engine, log = engine_of(make), OutputLog()
    engine.add(RANDOM)
    step_until(engine, lambda: len(log["source"].text) == 6, log)
    known = log["source"].text
    for index in (1, 2, 3):
        engine.fork("source", f"fork-{index}", index)
    run(engine, log=log)
    for index in (1, 2, 3):
        request = replace(
            RANDOM,
            id=f"fork-{index}",
            token_ids=(*RANDOM.token_ids, *known[:6]),
            prompt_tokens=RANDOM.prompt_len,
            sampling=replace(RANDOM.sampling, output_index=index),
        )
        expected = recompute_each_step(make(64), request)
        assert log[f"fork-{index}"].text == expected.text
    assert len({tuple(result.text) for id, result in log.by_id.items() if id != "source"}) == 3
    nothing_is_held(engine)


def test_full_blocks_are_shared_and_a_partial_one_is_copied(make: MakeDevice) -> None:
    engine, log = engine_of(make), OutputLog()
    engine.add(GREEDY)
    step_until(engine, lambda: len(log["source"].text) == 5, log)
    source = engine.sequences["source"]
    assert source.block_table is not None
    assert source.num_computed == 14, "three full blocks and two slots of the fourth"
    before = engine.load().held_blocks
    engine.fork("source", "child", 0)
    child = engine.sequences["child"].block_table
    assert child is not None
    assert list(child.blocks[0][:3]) == list(source.block_table.blocks[0][:3])
    assert not set(child.blocks[0][3:]) & set(source.block_table.blocks[0])
    assert engine.load().held_blocks == before + 1
    assert engine.blocks_of(["source", "child"]) == engine.load().held_blocks
    counts = Counter(block for blocks in engine.pool.held_by().values() for block in blocks)
    assert sorted(counts.values()) == [1, 1, 2, 2, 2]
    first, second = (engine.device.read(table.blocks[0][3]) for table in (source.block_table, child))
    assert bytes(first) == bytes(second)
    engine.cancel("source")
    engine.check_integrity()
    expected = recompute_each_step(make(64), GREEDY).text
    assert run(engine, log=log)["child"].text == expected[5:], "the child does not need its source"
    nothing_is_held(engine)


def test_a_sequence_is_forked_in_its_prompt_while_it_waits_and_when_it_is_parked(make: MakeDevice) -> None:
    engine, log = engine_of(make, budget=4, max_running=2), OutputLog()
    parks = replace(GREEDY, park_after=2)
    engine.add(parks)
    engine.fork("source", "waiting", 0)
    assert {one.id for one in engine.scheduler.waiting} == {"source", "waiting"}
    log.record(engine.step())
    assert engine.sequences["source"].num_computed == 4
    engine.fork("source", "in its prompt", 0)
    engine.check_integrity()
    run(engine, log=log)
    assert {*engine.parked} == {"source", "waiting", "in its prompt"}
    engine.fork("source", "of parked", 0)
    run(engine, log=log)
    expected = recompute_each_step(make(64), replace(GREEDY, park_after=None)).text
    assert log["of parked"].text == expected[2:]
    for id in ("waiting", "in its prompt"):
        assert log[id].text == expected[:2]
        receiver = engine_of(make)
        import_sequence(receiver, replace(parks, id=id), export_sequence(engine, id))
        assert run(receiver, log=log)[id].text == expected
    engine.cancel("source")
    log.record(engine.step())
    nothing_is_held(engine)


def test_forks_that_preempt_each_other_generate_the_same(make: MakeDevice) -> None:
    engine, log = engine_of(make, num_blocks=12, context_length=48), OutputLog()
    engine.add(GREEDY)
    step_until(engine, lambda: len(log["source"].text) == 2, log)
    for index in range(3):
        engine.fork("source", f"fork-{index}", 0)
    run(engine, log=log)
    assert engine.load().preemptions
    for index in range(3):
        assert log[f"fork-{index}"].text == log["source"].text[2:]
    nothing_is_held(engine)


def test_a_fork_that_cannot_be_made_leaves_nothing(make: MakeDevice) -> None:
    engine, log = engine_of(make, num_blocks=8, max_running=2, context_length=32), OutputLog()
    with pytest.raises(UnknownSequence):
        engine.fork("source", "child", 0)
    engine.add(GREEDY)
    step_until(engine, lambda: bool(log["source"].text), log)
    with pytest.raises(InvalidRequest):
        engine.fork("source", "source", 0)
    engine.fork("source", "second", 0)
    with pytest.raises(OutOfBlocks):
        engine.fork("source", "third", 0)
    engine.check_integrity()
    assert {*engine.sequences} == {"source", "second"}
    run(engine, log=log)
    full = engine_of(make, num_blocks=6, context_length=24)
    full.add(make_request("source", prompt(5 * BLOCK - 1, 2), 4))
    step_until(full, lambda: full.sequences["source"].num_output > 0, log=None)
    with pytest.raises(OutOfBlocks):
        full.fork("source", "child", 0)
    full.check_integrity()
    for each in (engine, full):
        run(each)
        nothing_is_held(each)
