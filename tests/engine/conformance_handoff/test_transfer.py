from __future__ import annotations

from dataclasses import replace

import pytest

from decant.engine.output import BlockFilled
from decant.engine.request import StopParams
from tests.engine.conformance_handoff.harness import MOVED, engine_of, expected, parked_sender
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    OutputLog,
    export_sequence,
    import_sequence,
    make_request,
    prompt,
    run,
    step_until,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone


@pytest.mark.parametrize("cached_blocks", [0, 2, 5])
def test_an_output_continues_on_another_engine(make: MakeDevice, cached_blocks: int) -> None:
    sender, log = parked_sender(make)
    receiver = engine_of(make)
    if cached_blocks:
        run(receiver, make_request("before", MOVED.token_ids[: cached_blocks * 4 + 1], 1))
    payload = export_sequence(sender, "moved", cached_blocks)
    assert [address.block for address, _, _ in payload.blocks] == list(range(cached_blocks, 6))
    import_sequence(receiver, MOVED, payload)
    assert receiver.scheduler.running[0].num_remaining == 1, "nothing is computed again"
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_blocks_are_sent_while_the_prompt_is_computed(make: MakeDevice) -> None:
    sender, receiver, log = engine_of(make, budget=8), engine_of(make), OutputLog()
    sender.add(MOVED)
    arrival = receiver.transfers.reserve(replace(MOVED, park_after=None))
    export = sender.transfers.export("moved", arrival.cached_blocks)
    filled: list[BlockFilled] = []
    sent = [0]
    while not sender.parked:
        filled += log.record(sender.step()).filled
        sent.append(len(export.blocks))
        for block in export.blocks[sent[-2] : sent[-1]]:
            arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
    assert sent[1:4] == [2, 4, 5], "a block is offered by the step that fills it"
    assert [events.block for events in filled] == [block.address for block in export.blocks]
    commit = sender.transfers.finalize("moved")
    for block in export.blocks[sent[-1] :]:
        arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release("moved")
    run(receiver, log=log)
    same_output_as_alone(log["moved"], expected(make))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_the_step_that_reaches_park_after_reports_it(make: MakeDevice) -> None:
    sender = engine_of(make, budget=8)
    sender.add(MOVED)
    sender.add(replace(MOVED, id="short", stop=StopParams(max_tokens=2)))
    parked, ended = list[tuple[str, int]](), list[str]()
    while sender.has_work:
        output = sender.step()
        parked += [(id, token.position) for id in output.parked for token in output.tokens if token.id == id]
        ended += [events.id for events in output.ended]
    assert parked == [("moved", 1)]
    assert ended == ["short"], "what ends is not parked"


def test_a_sequence_is_migrated_in_the_middle_of_its_output(make: MakeDevice) -> None:
    sender, receiver = engine_of(make), engine_of(make)
    request, other = replace(MOVED, park_after=None), make_request("other", prompt(9, 4), 12)
    sender.add(other)
    sender.add(request)
    log = OutputLog()
    step_until(sender, lambda: len(log["moved"].text) == 4, log)
    arrival, export = receiver.transfers.reserve(request), sender.transfers.export("moved")
    step_until(sender, lambda: len(log["moved"].text) == 8, log)
    sender.park("moved")
    log.record(sender.step())
    assert len(log["moved"].text) == 8, "a parked sequence is not stepped"
    commit = sender.transfers.finalize("moved")
    arrival.extend(len(log["moved"].text) + request.prompt_len)
    for block in export.blocks:
        arrival.write(block.address, bytes(export.read(block.address)), block.checksum)
    receiver.transfers.join(arrival, commit)
    sender.transfers.release("moved")
    run(receiver, log=log)
    run(sender, log=log)
    for each in (request, other):
        same_output_as_alone(log[each.id], expected(make, each))
    for engine in (sender, receiver):
        nothing_is_held(engine)


def test_a_parked_sequence_without_a_receiver_resumes(make: MakeDevice) -> None:
    sender, log = parked_sender(make)
    sender.transfers.export("moved")
    sender.transfers.finalize("moved")
    sender.resume("moved")
    sender.transfers.release("moved")
    run(sender, log=log)
    same_output_as_alone(log["moved"], expected(make))
    nothing_is_held(sender)


def test_prompt_log_probabilities_are_emitted_once_across_handoff_and_preemption(make: MakeDevice) -> None:
    request = replace(MOVED, prompt_logprobs=1)
    sender, receiver = engine_of(make, budget=8), engine_of(make, num_blocks=12)
    log = run(sender, request)
    import_sequence(receiver, request, export_sequence(sender, "moved"))
    receiver.add(make_request("urgent", prompt(12, 6), 24, priority=9))
    run(receiver, log=log)
    assert receiver.load().preemptions
    same_output_as_alone(log["moved"], expected(make, request))
