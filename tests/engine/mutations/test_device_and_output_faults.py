from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from decant.engine.engine import Engine
from decant.engine.fake import FakeDevice
from decant.engine.plan import Row
from decant.engine.scheduler import Scheduler
from decant.engine.sequence import Sequence as EngineSequence
from tests.engine.mutations.harness import Patch, check_found

pytestmark = pytest.mark.slow


def write_into_the_wrong_slot(patch: Patch) -> None:
    def fill(device: FakeDevice, row: Row) -> None:
        original(device, row)
        flipped = device.read(0)
        flipped[3] ^= 1

    original = FakeDevice._fill
    patch.setattr(FakeDevice, "_fill", fill)


def emit_an_end_twice(patch: Patch) -> None:
    def end(engine: Engine, sequence: EngineSequence, *args: object, **more: object) -> None:
        original(engine, sequence, *args, **more)
        engine._ended.append(engine._ended[-1])

    original: Callable[..., None] = Engine._end
    patch.setattr(Engine, "_end", end)


def emit_no_end(patch: Patch) -> None:
    def end(engine: Engine, sequence: EngineSequence, *args: object, **more: object) -> None:
        original(engine, sequence, *args, **more)
        engine._ended.pop()

    original: Callable[..., None] = Engine._end
    patch.setattr(Engine, "_end", end)


def emit_prompt_logprobs_again(patch: Patch) -> None:
    def preempt(scheduler: Scheduler, sequence: EngineSequence) -> None:
        sequence.prompt_logprobs_sent = 1
        original(scheduler, sequence)

    original = Scheduler._preempt
    patch.setattr(Scheduler, "_preempt", preempt)


def draw_in_the_order_of_calls(patch: Patch) -> None:
    def counter_uniform(*_: int) -> float:
        return next(numbers)

    numbers: Iterator[float] = ((n * 0.37 + 0.11) % 1 for n in range(10**9))
    patch.setattr("decant.engine.fake.counter_uniform", counter_uniform)


FAULTS: dict[Callable[[Patch], None], str] = {
    write_into_the_wrong_slot: "does not hold|changed under its lease|holds other bytes",
    emit_an_end_twice: "ended twice",
    emit_no_end: "has no end",
    emit_prompt_logprobs_again: "have a gap",
    draw_in_the_order_of_calls: "wrote|alone",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_properties_detect(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    check_found(fault, FAULTS[fault], monkeypatch)
