from __future__ import annotations

from dataclasses import replace

import pytest

from decant.engine.errors import UnknownSequence
from decant.engine.kv_layout import FULL, Window, WindowKind
from decant.engine.request import SamplingParams
from tests.engine.factories import (
    OutputLog,
    export_sequence,
    import_sequence,
    make_device,
    make_engine,
    make_request,
    recompute_each_step,
    run,
    step_until,
)
from tests.engine.properties import nothing_is_held, same_output_as_alone

LIVE = make_request("live", 22, 12, sampling=SamplingParams(temperature=1.0, seed=3))


@pytest.mark.parametrize("windows", [(FULL,), (FULL, Window(WindowKind.SLIDING, 7))])
def test_an_export_is_finalized_when_only_its_last_block_is_unsent(windows: tuple[Window, ...]) -> None:
    device = make_device()
    device.windows = windows
    engine, log = make_engine(device=device, budget=8, context_length=64), OutputLog()
    engine.add(LIVE)
    log.record(engine.step())
    export = engine.transfers.export("live")
    while engine.load().queued_tokens > 1:
        assert engine.transfers.finalize_running("live", len(export.blocks)) is None, "its prompt is still computed"
        log.record(engine.step())
    sent = len(export.blocks)
    assert engine.transfers.finalize_running("live", sent - 1) is None
    assert engine.load().running == 1, "it runs on while more is left"
    commit = engine.transfers.finalize_running("live", sent)
    assert commit is not None
    assert commit.computed == 22 + len(commit.outputs[0].tokens) - 1
    assert len(export.blocks) == sent + len(windows)
    assert (engine.load().running, len(engine.parked)) == (0, 1)
    engine.transfers.release("live")
    nothing_is_held(engine)


@pytest.mark.parametrize("committed", [False, True])
def test_a_withdrawn_export_changes_nothing(committed: bool) -> None:
    engine = make_engine(budget=8)
    log = run(engine, LIVE, steps=5)
    export = engine.transfers.export("live")
    if committed:
        assert engine.transfers.finalize_running("live", len(export.blocks)) is not None
    engine.transfers.cancel("live")
    engine.transfers.cancel("live")
    run(engine, log=log)
    same_output_as_alone(log["live"], recompute_each_step(make_engine().device, LIVE))
    nothing_is_held(engine)


def test_an_unknown_sequence_is_not_finalized() -> None:
    engine = make_engine()
    with pytest.raises(UnknownSequence):
        engine.transfers.finalize_running("live", 0)
    engine.add(LIVE)
    with pytest.raises(UnknownSequence):
        engine.transfers.finalize_running("live", 0)  # without an export


def test_blocks_found_after_a_preemption_are_exported_with_their_own_checksums() -> None:
    sender, receiver = make_engine(max_running=1), make_engine()
    sender.add(replace(LIVE, park_after=3))
    sender.step()
    sender.park("live")
    sender.add(make_request("urgent", 5, None, priority=1))
    sender.step()
    sender.resume("live")
    assert sender.load().preemptions == 1
    for block in sender.pool.index.published:
        sender.device.read(block)[0] ^= 1
    sender.cancel("urgent")
    step_until(sender, lambda: "live" in sender.parked)
    import_sequence(receiver, LIVE, export_sequence(sender, "live"))
    assert receiver.load().running == 1
