"""Bytes for KV blocks on a device with memory of its own.

total   [ weights | other processes | activations of the largest step | CUDA graphs | margin | KV blocks ]
                                      measured                          budget        2 %
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from decant.engine.errors import InvalidConfig
from decant.engine.plan import DeviceMemory, Row, StepPlan, StepResult
from decant.engine.request import Request
from decant.engine.scheduler import MAX_TOKEN_BUDGET, Limits

HOST_BYTES = 1 << 30
"""Of a device that computes in the host's memory."""

MARGIN = 0.02
"""For fragments, and kernels that are loaded later."""


def bytes_left(memory: DeviceMemory, activations: int, graphs: int) -> int:
    return memory.free - activations - graphs - int(memory.total * MARGIN)


def largest_steps(context_length: int, block_size: int, groups: int) -> Sequence[StepPlan]:
    """The longest chunk of a prompt, and a token of each of the most sequences.

    On blocks from 0 on, the same in each cache group.
    """
    longest = min(MAX_TOKEN_BUDGET, context_length)
    per_row = -(-longest // block_size)
    chunk = Row(
        Request("memory", (0,) * longest), (0,) * longest, 0, longest, (array("i", range(per_row)),) * groups, True
    )
    decodes = [
        Row(Request("memory", (0,)), (0,), 0, 1, (array("i", [index % per_row]),) * groups, True)
        for index in range(Limits().max_running)
    ]
    return StepPlan((chunk,), longest), StepPlan(tuple(decodes), len(decodes))


def blocks_of_largest_steps(context_length: int, block_size: int) -> int:
    return -(-min(MAX_TOKEN_BUDGET, context_length) // block_size)


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
