from __future__ import annotations

import pytest

from decant.engine.request import FinishReason
from tests.engine.conformance.harness import engine_of
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    make_request,
    prompt,
    run,
    step_until,
)
from tests.engine.properties import nothing_is_held


@pytest.mark.parametrize("state", ["waiting", "prefill", "decode", "preempted", "parked"])
def test_a_cancel_frees_everything_in_any_state(make: MakeDevice, state: str) -> None:
    engine = engine_of(make, num_blocks=12, budget=4, max_running=4)
    log = run(engine, make_request("a", 10, 20), make_request("b", prompt(10, 2), 24), steps=0)
    if state == "prefill":
        log.record(engine.step())
    elif state in ("decode", "parked"):
        step_until(engine, lambda: len(log["a"].text) == 2, log)
    elif state == "preempted":
        step_until(engine, lambda: engine.load().preemptions > 0, log)
    if state == "parked":
        engine.park("a")
    victim = "b" if state == "preempted" else "a"
    assert engine.cancel(victim)
    assert not engine.cancel(victim)
    engine.check_integrity()
    run(engine, log=log)
    assert log[victim].reason is FinishReason.CANCELLED
    assert {log[id].reason for id in "ab" if id != victim} == {FinishReason.LENGTH}
    nothing_is_held(engine)


def test_cancelling_an_unknown_id_is_no_error(make: MakeDevice) -> None:
    assert not engine_of(make).cancel("unknown")
