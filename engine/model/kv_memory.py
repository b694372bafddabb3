"""Bytes for KV blocks on a device with memory of its own.

total   [ weights | other processes | activations of the largest step | CUDA graphs | margin | KV blocks ]
                                      measured                          budget        2 %
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decant.engine.errors import InvalidConfig
from decant.engine.plan import DeviceMemory, Row, StepPlan, StepResult
from decant.engine.request import Request, SamplingParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import MAX_TOKEN_BUDGET, Limits

HOST_BYTES = 1 << 30
"""Of a device that computes in the host's memory."""

MARGIN = 0.02
"""For fragments, and kernels that are loaded later."""


def bytes_left(memory: DeviceMemory, activations: int, graphs: int) -> int:
    return memory.free - activations - graphs - int(memory.total * MARGIN)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Most tokens and most sequences of a step."""

    tokens: int = MAX_TOKEN_BUDGET
    sequences: int = Limits().max_running


def largest_steps(sizes: StepSizes, context_length: int, block_size: int, groups: int) -> Sequence[StepPlan]:
    """The steps that need most memory: prompts of the most tokens, and a drawn token of each of the most sequences.

    Prompts are as long as the context. On blocks from 0 on (``blocks_of_largest_steps``), the same for all rows.
    """
    longest = min(sizes.tokens, context_length)
    blocks = (array("i", range(-(-longest // block_size))),) * groups
    lengths = [longest] * (sizes.tokens // longest) + [sizes.tokens % longest] * bool(sizes.tokens % longest)
    prompts = [Row(Request("memory", (0,) * length), (0,) * length, 0, length, blocks, True) for length in lengths]
    drawn = Request("memory", (0,), sampling=SamplingParams(temperature=1.0, seed=0), logprobs=1)
    decodes = [Row(drawn, (0,), 0, 1, blocks, True, SamplerState(drawn))] * sizes.sequences
    return StepPlan(tuple(prompts), sizes.tokens), StepPlan(tuple(decodes), len(decodes))


def blocks_of_largest_steps(sizes: StepSizes, context_length: int, block_size: int) -> int:
    return -(-min(sizes.tokens, context_length) // block_size)


def choose(
    measure: Callable[[Callable[[], object]], int], run: Callable[[StepPlan], StepResult], plans: Sequence[StepPlan]
) -> int:
    """``measure`` runs the steps and returns the bytes left. Raises InvalidConfig."""

    def steps() -> None:
        for plan in plans:
            run(plan)

    left = measure(steps)
    if left < 1:
        raise InvalidConfig("kv_bytes", "memory beside the weights and the activations of a step", f"{left} bytes free")
    return left
