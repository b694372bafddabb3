"""Measured rates of one worker: seconds of its steps, and prompt tokens per second while prompts wait there."""

from __future__ import annotations

from decant.protos import worker_pb2 as wire
from decant.protos.state_pb2 import Capacity

_GAIN = 0.25
"""Weight of one interval between heartbeats, for prompts."""
_DECAY = 0.95
"""The same, of what came before, for steps: half of their weight is as old as 14 heartbeats."""

MAX_DELAY_SECONDS = 10.0
"""Delay of a heartbeat, by which the next one may seem to cover more time than has passed."""


class WorkerRates:
    """Rates from heartbeats, so that they include all that slows the worker down.

    The step costs that a worker measured at its start say how a step grows with its batch; the steps since then say how
    many times as long they take.
    """

    def __init__(self, capacity: Capacity) -> None:
        self.prompt_tokens_per_s = 0.0
        """Zero: unknown."""
        self._fixed_s = capacity.step_us / 1e6
        self._per_sequence_s = capacity.step_us_per_sequence / 1e6
        self._measured_s = 0.0
        self._expected_s = 0.0
        self._load: wire.Load | None = None
        self._first: tuple[float, int] | None = None  # time and busy microseconds of the first load
        self._prompts: tuple[float, int] | None = None  # time, tokens computed until then

    @property
    def step_s(self) -> float:
        """Seconds of a step without sequences; zero: unknown."""
        return self._slowdown * self._fixed_s if self._has_costs else self._slowdown

    @property
    def step_s_per_sequence(self) -> float:
        return self._slowdown * self._per_sequence_s

    @property
    def _slowdown(self) -> float:
        return self._measured_s / self._expected_s if self._expected_s else 0.0

    @property
    def _has_costs(self) -> bool:
        return self._fixed_s + self._per_sequence_s > 0

    def apply_heartbeat(self, heartbeat: wire.Heartbeat, now: float, queued_tokens: int, computed_tokens: int) -> None:
        """Add the interval since the last heartbeat.

        ``queued_tokens`` are the prompt tokens that this router has at the worker; ``computed_tokens`` counts those
        that the worker has computed.
        """
        if heartbeat.HasField("load"):
            self._add_steps(heartbeat.load, now)
        self._add_prompts(now, queued_tokens, computed_tokens)

    def _add_steps(self, load: wire.Load, now: float) -> None:
        began_at, began_us = self._first = self._first or (now, load.busy_us)
        if load.busy_us - began_us > (now - began_at + MAX_DELAY_SECONDS) * 1e6:
            return  # a worker is not busy for longer than it has time
        before, self._load = self._load, wire.Load()
        self._load.CopyFrom(load)
        if before is None or load.busy_steps <= before.busy_steps:
            return
        steps, seconds = load.busy_steps - before.busy_steps, (load.busy_us - before.busy_us) / 1e6
        sequences = (load.running + before.running) / 2
        expected = self._fixed_s + self._per_sequence_s * sequences if self._has_costs else 1.0
        self._measured_s = _DECAY * self._measured_s + seconds
        self._expected_s = _DECAY * self._expected_s + steps * expected

    def _add_prompts(self, now: float, queued_tokens: int, computed_tokens: int) -> None:
        if not queued_tokens:
            self._prompts = None
            return
        if self._prompts is not None and now > self._prompts[0]:
            since, before = self._prompts
            rate = (computed_tokens - before) / (now - since)
            self.prompt_tokens_per_s += (_GAIN if self.prompt_tokens_per_s else 1.0) * (rate - self.prompt_tokens_per_s)
        self._prompts = now, computed_tokens
