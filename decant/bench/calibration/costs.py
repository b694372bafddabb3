from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

from decant.engine.costs import StepCostModel, StepWork, chunk
from decant.engine.model.calibration import fit

_LEAST_SECONDS = 1e-4
"""A clock resolves no less."""


class PromptSample(NamedTuple):
    tokens: int
    seconds: float


class StepSample(NamedTuple):
    sequences: int
    context: int
    seconds: float

    @property
    def work(self) -> StepWork:
        return StepWork(self.sequences, self.sequences, self.sequences * (self.context + 1))


@dataclass(frozen=True)
class Samples:
    """Measurements through the client, in seconds.

    lone           TTFT, deployment idle
    prefills       of a prefill worker that always has a prompt, nothing else running
    steps          of a decode worker, nothing else running
    handoffs       from first to second token, deployment idle
    beside         as `prefills`, without handoffs, beside running answers
    both           prompts that are all handed off beside running answers: prefill, step, first to second token
    """

    lone: Sequence[PromptSample]
    prefills: Sequence[PromptSample]
    steps: Sequence[StepSample]
    handoffs: Sequence[float]
    beside: PromptSample
    both: tuple[PromptSample, StepSample, float]


def costs(samples: Samples) -> dict[str, Any]:
    """Return costs as clients see them, in the format of `decant.plan.costs.cost_profile`; contention is at least 1."""
    prefill = fit([(chunk(0, tokens), seconds) for tokens, seconds in samples.prefills])
    decode = fit([(one.work, one.seconds) for one in samples.steps])
    alone = decode.seconds(StepSample(1, max(one.tokens for one in samples.lone), 0.0).work)
    handoff = max(_LEAST_SECONDS, median(samples.handoffs) - alone)
    prompt, step, pause = samples.both
    return {
        "prefill": asdict(prefill),
        "decode": asdict(decode),
        "latency": max(0.0, median(one.seconds - _seconds(prefill, one) for one in samples.lone)),
        "handoff": handoff,
        "sending": max(0.0, prompt.seconds - samples.beside.seconds) / prompt.tokens,
        "contention": {
            "prefill": max(1.0, samples.beside.seconds / _seconds(prefill, samples.beside)),
            "decode": max(1.0, step.seconds / decode.seconds(step.work)),
            "handoff": max(1.0, (pause - step.seconds) / handoff),
        },
    }


def _seconds(prefill: StepCostModel, sample: PromptSample) -> float:
    return prefill.seconds(chunk(0, sample.tokens))
