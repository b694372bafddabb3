"""Who waits for room is asked for again exactly when room may have come."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from decant.engine.engine import Engine
from decant.engine.output import StepOutput
from decant.engine.request import Request, StopParams
from decant.protos import worker_pb2 as wire
from decant.worker.decode.admission import DecodeAdmission, Outcome
from decant.worker.decode.runs import DecodeRun
from decant.worker.engine_host import EngineHost
from tests.worker.decode_harness import Device


class Desk:
    """An entrance whose engine does one thing at a time, when a test says so."""

    def __init__(self) -> None:
        self.engine = Engine(Device(16))
        self.posted: list[tuple[Callable[[Engine], object], Callable[[], object]]] = []
        self.settled: list[tuple[str, Outcome]] = []
        host = SimpleNamespace(loop=self, waiting_arrivals=0)
        self.entrance = DecodeAdmission(
            cast(EngineHost, host), lambda held, outcome: self.settled.append((held.request.id, outcome))
        )

    def post(self, command: Callable[[Engine], object], then: Callable[[], object]) -> None:
        self.posted.append((command, then))

    def step(self, *between: Callable[[Engine], object]) -> None:
        """What was posted, then ``between``, then a step; and all that comes of it, in the order of the loop."""
        posted, self.posted = self.posted, []
        for command, _ in posted:
            command(self.engine)
        for other in between:
            other(self.engine)
        output: StepOutput = self.engine.step()
        self.entrance.on_step(output)
        for _, then in posted:
            then()


def arriving(name: str, length: int, number: int = 0) -> DecodeRun:
    request = Request(name, tuple(range(length)), stop=StopParams(max_tokens=4))
    held = DecodeRun(wire.Run(request=name), request, wire.Stopping(), (0.0, number), 0.0)
    held.ticket = wire.Ticket()
    return held


def crowded() -> tuple[Desk, Any]:
    """A desk at which ``late`` waits for the room that an arrival holds."""
    desk = Desk()
    desk.entrance.push(arriving("first", 40))
    desk.step()
    desk.entrance.push(arriving("late", 40, 1))
    return desk, desk.settled[0][1]


def test_room_that_came_in_the_very_step_of_the_answer_is_seen() -> None:
    desk, room = crowded()
    desk.step(lambda _: room.abort())  # behind the question, before the step
    assert desk.posted, "nobody asks again, and nothing else will happen"
    desk.step()
    assert [name for name, _ in desk.settled] == ["first", "late"]


def test_nobody_asks_again_while_nothing_changes() -> None:
    desk, room = crowded()
    for _ in range(3):
        desk.step()
        assert not desk.posted
    desk.step(lambda _: room.abort())
    assert len(desk.posted) == 1
    desk.step()
    assert not desk.posted


def test_who_comes_while_the_answer_is_on_its_way_does_not_overtake() -> None:
    desk, room = crowded()
    desk.entrance.push(arriving("small", 4, 2))
    desk.step()
    assert len(desk.settled) == 1
    while desk.posted:
        desk.step()
    desk.step(lambda _: room.abort())
    desk.step()
    assert [name for name, _ in desk.settled] == ["first", "late", "small"]
