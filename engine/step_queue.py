"""Steps that were launched and are not committed.

While a device that overlaps steps computes one, the engine launches the next::

    host      launch 1, launch 2 | commit 1, launch 3 | commit 2, launch 4 | ...
    device             [ step 1 ][ step 2            ][ step 3            ]

The row of a sequence that step 1 ends is dropped; its blocks are held until step 2 has ended, as the device writes to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from decant.engine.guides.mask import GuideMask, begin_masks
from decant.engine.plan import Device, StepPlan, StepResult
from decant.engine.scheduler import Scheduler
from decant.engine.sequence import InFlight, Sequence


@dataclass(slots=True)
class LaunchedStep:
    """Submitted step. Call ``wait`` once; ``on_done`` is called once the device no longer uses the step's blocks.

    ``guides`` are those of its rows that draw, by row index.
    """

    plan: StepPlan
    sequences: list[Sequence]
    started: float
    wait: Callable[[], StepResult]
    guides: dict[int, GuideMask]
    on_done: list[Callable[[], object]] = field(default_factory=list)

    def drop_ended(self, result: StepResult) -> tuple[StepPlan, list[Sequence], StepResult]:
        if not self.on_done:  # their blocks would wait for this step
            return self.plan, self.sequences, result
        ended = {index for index, sequence in enumerate(self.sequences) if sequence.timeline.finished is not None}
        kept = [index for index in range(len(self.sequences)) if index not in ended]
        rows = tuple(self.plan.rows[index] for index in kept)
        return self.plan._replace(rows=rows), [self.sequences[index] for index in kept], result.select(kept)


class StepQueue:
    def __init__(self, device: Device, clock: Callable[[], float]) -> None:
        self._device = device
        self._clock = clock
        self._overlaps = device.overlaps_steps and not device.lookahead  # further tokens move the next step's positions
        self._steps: list[LaunchedStep] = []  # at most two, the older one first

    def __bool__(self) -> bool:
        return bool(self._steps)

    def launch(self, scheduler: Scheduler, reserved_slots: int) -> LaunchedStep | None:
        """Return the older step, launched now if there is none; None if there is nothing to compute."""
        if not self._steps:
            self._launch(*scheduler.schedule(reserved_slots))
        return self._steps[0] if self._steps else None

    def launch_ahead(self, scheduler: Scheduler, reserved_slots: int) -> None:
        if self._overlaps and (ahead := scheduler.schedule_ahead(reserved_slots)):
            self._launch(*ahead)

    def _launch(self, plan: StepPlan, sequences: list[Sequence]) -> None:
        if not plan.rows:
            return
        started, guides = self._clock(), _guides_of(plan)
        self._steps.append(LaunchedStep(plan, sequences, started, self._device.submit(plan), guides))
        if self._overlaps:
            self._clear_in_flight(self._steps[:-1])
            for index, (sequence, row) in enumerate(zip(sequences, plan.rows, strict=True)):
                sequence.in_flight = InFlight(index, row.end, row.sample)

    def finish(self) -> StepResult:
        result = self._steps[0].wait()
        step = self._steps.pop(0)
        if not self._steps:
            self._clear_in_flight([step])
        for action in step.on_done:
            action()
        failed = {index: str(guide.error) for index, guide in step.guides.items() if guide.error is not None}
        return result.without_tokens(failed) if failed else result

    @staticmethod
    def _clear_in_flight(steps: list[LaunchedStep]) -> None:
        for step in steps:
            for sequence in step.sequences:
                sequence.in_flight = None

    def call_when_unused(self, sequence: Sequence, action: Callable[[], object]) -> None:
        if sequence.in_flight is None:
            action()
        else:
            self._steps[-1].on_done.append(action)

    def call_after_releases(self, action: Callable[[], object]) -> None:
        if self._steps and self._steps[-1].on_done:
            self._steps[-1].on_done.append(action)
        else:
            action()

    @property
    def ended_ids(self) -> set[str]:
        return {
            sequence.id
            for step in self._steps
            for sequence in step.sequences
            if sequence.timeline.finished is not None and sequence.block_table
        }


def _guides_of(plan: StepPlan) -> dict[int, GuideMask]:
    """Guides of the rows that draw. Their masks are computed from now on, while the device computes the step."""
    guides, works = {}, []
    for index, row in enumerate(plan.rows):
        if row.state is not None and row.state.guide is not None and row.sample:
            guides[index] = row.state.guide
            works.append((row.state.guide, row.tokens, row.end))
    if works:
        begin_masks(works)
    return guides
