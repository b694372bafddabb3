"""Speed of a worker.

roofline    max(bytes read / bandwidth, operations / product rate)     a step without overhead
profile     fixed + token x tokens + logits x rows + pair x pairs      the engine's cost model
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from decant.engine.costs import StepCostModel, StepWork, chunk
from decant.plan.capacity.devices import Device
from decant.plan.capacity.model_shape import BYTES, ModelShape


class Speed(Protocol):
    """Seconds of work on one worker; `context` is the mean tokens of a sequence."""

    def prefill(self, tokens: float) -> float: ...

    def step(self, sequences: float, context: float) -> float: ...


@dataclass(frozen=True, slots=True)
class Roofline:
    """Roofline whose `bandwidth` and `flops` per second are those reached, not the peaks of the device."""

    shape: ModelShape
    step_bytes: int
    kv_bytes: int
    bandwidth: float
    flops: float

    def prefill(self, tokens: float) -> float:
        pairs = tokens * (tokens + 1) / 2
        bytes_read = self.step_bytes + tokens * self.kv_bytes
        return max(bytes_read / self.bandwidth, self._operations(tokens, pairs) / self.flops)

    def step(self, sequences: float, context: float) -> float:
        pairs = sequences * (context + 1)
        bytes_read = self.step_bytes + pairs * self.kv_bytes
        return max(bytes_read / self.bandwidth, self._operations(sequences, pairs) / self.flops)

    def _operations(self, tokens: float, pairs: float) -> float:
        return 2 * self.shape.active * tokens + self.shape.pair_operations * pairs


@dataclass(frozen=True, slots=True)
class Measured:
    prompt_costs: StepCostModel
    step_costs: StepCostModel

    def prefill(self, tokens: float) -> float:
        return self.prompt_costs.seconds(chunk(0, round(tokens)))

    def step(self, sequences: float, context: float) -> float:
        fixed, one = self.step_costs.fixed, StepWork(1, 1, round(context) + 1)
        return fixed + sequences * (self.step_costs.seconds(one) - fixed)


@dataclass(frozen=True, slots=True)
class Slowed:
    speed: Speed
    prefill_factor: float
    step_factor: float

    def prefill(self, tokens: float) -> float:
        return self.prefill_factor * self.speed.prefill(tokens)

    def step(self, sequences: float, context: float) -> float:
        return self.step_factor * self.speed.step(sequences, context)


@dataclass(frozen=True, slots=True)
class Efficiency:
    bandwidth: float
    flops: float


def roofline(shape: ModelShape, device: Device, dtypes: tuple[str, str | None, str], share: Efficiency) -> Roofline:
    """Return a roofline; float32 products run at half the rate of bfloat16, quantized weights are converted first."""
    dtype, quantization, kv_dtype = dtypes
    rate = device.flops * share.flops * min(1.0, 2 / BYTES[dtype])
    bandwidth = device.bandwidth * share.bandwidth
    return Roofline(shape, shape.step_bytes(dtype, quantization), shape.kv_bytes(kv_dtype), bandwidth, rate)
