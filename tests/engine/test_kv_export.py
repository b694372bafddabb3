"""A sequence is sealed while it runs, once next to nothing of it is left to be sent; or it runs on."""

from __future__ import annotations

import pytest

from decant.engine.errors import UnknownSequence
from decant.engine.request import SamplingParams
from tests.engine.factories import Ear, make_engine, make_request, plainly, run
from tests.engine.properties import nothing_is_held, told_as_alone

LIVE = make_request("live", 22, 12, sampling=SamplingParams(temperature=1.0, seed=3))


def test_it_is_sealed_when_no_more_than_its_last_block_is_left() -> None:
    engine, ear = make_engine(budget=8), Ear()
    engine.add(LIVE)
    ear.hear(engine.step())
    export = engine.export("live")
    while engine.load().queued_tokens > 1:
        assert engine.seal_running("live", len(export.runs)) is None, "its prompt is still computed"
        ear.hear(engine.step())
    sent = len(export.runs)
    assert engine.seal_running("live", sent - 1) is None
    assert engine.load().running == 1, "it runs on while more is left"
    seal = engine.seal_running("live", sent)
    assert seal is not None
    assert seal.computed == 22 + len(seal.output) - 1
    assert len(export.runs) == sent + 1
    assert (engine.load().running, engine.load().parked) == (0, 1)
    engine.release("live")
    nothing_is_held(engine)


@pytest.mark.parametrize("sealed", [False, True])
def test_what_is_withdrawn_runs_on_as_if_nothing_had_been_asked(sealed: bool) -> None:
    engine = make_engine(budget=8)
    ear = run(engine, LIVE, steps=5)
    export = engine.export("live")
    if sealed:
        assert engine.seal_running("live", len(export.runs)) is not None
    engine.withdraw("live")
    engine.withdraw("live")
    run(engine, ear=ear)
    told_as_alone(ear["live"], plainly(make_engine().device, LIVE))
    nothing_is_held(engine)


def test_nobody_is_sealed_who_is_not_there() -> None:
    engine = make_engine()
    with pytest.raises(UnknownSequence):
        engine.seal_running("live", 0)
    engine.add(LIVE)
    with pytest.raises(UnknownSequence):
        engine.seal_running("live", 0)  # without an export
