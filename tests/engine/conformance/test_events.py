from __future__ import annotations

from dataclasses import replace

from decant.engine.request import StopParams
from tests.engine.conformance.harness import REQUESTS, engine_of
from tests.engine.conftest import MakeDevice
from tests.engine.factories import (
    make_request,
    run,
)
from tests.engine.properties import instants_are_in_order


def test_a_sequence_starts_with_its_cached_tokens(make: MakeDevice) -> None:
    engine, request = engine_of(make, budget=8), make_request("a", 30)
    first = run(engine, request)["a"].started
    again = run(engine, request)["a"].started
    assert first is not None
    assert again is not None
    assert (first.cached, first.tokens) == (0, 30)
    assert (again.cached, again.tokens) == (28, 30)  # whole blocks of 4, never all tokens
    for started in (first, again):
        assert started.timeline.scheduled is not None
        assert started.timeline.first_token is not None
        assert started.timeline.scheduled < started.timeline.first_token


def test_the_instants_of_a_sequence_are_in_order(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=12, budget=16)
    log = run(engine, *(replace(request, stop=StopParams(max_tokens=16)) for request in REQUESTS))
    engine.add(make_request("never"))
    engine.cancel("never")
    run(engine, log=log)
    ends = {id: result.ended.timeline for id, result in log.by_id.items() if result.ended}
    assert ends.keys() == log.by_id.keys()
    for id, timeline in ends.items():
        instants_are_in_order(timeline, len(log[id].tokens))
    last = ends.pop("never")
    assert all(timeline.finished and timeline.finished < last.added for timeline in ends.values())


def test_a_preempted_sequence_starts_once(make: MakeDevice) -> None:
    engine = engine_of(make, num_blocks=12, budget=16)
    for request in REQUESTS:
        engine.add(replace(request, stop=StopParams(max_tokens=16)))
    started, ended = list[tuple[str, float | None]](), list[tuple[str, float | None]]()
    while engine.has_work:
        output = engine.step()
        started += [(events.id, events.timeline.scheduled) for events in output.started]
        ended += [(events.id, events.timeline.scheduled) for events in output.ended]
    assert engine.load().preemptions
    assert sorted(started) == sorted(ended)
    assert len(started) == len(REQUESTS)
