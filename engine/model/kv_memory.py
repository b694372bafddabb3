"""Bytes for KV blocks on a device with memory of its own.

total   [ weights | other processes | activations of the largest step | CUDA graphs | margin | KV blocks ]
                                      measured                          budget        2 %
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from decant.engine.errors import InvalidConfig
from decant.engine.plan import DeviceMemory, Row, StepPlan
from decant.engine.request import Request, SamplingParams
from decant.engine.sampler_state import SamplerState
from decant.engine.scheduler import MAX_TOKEN_BUDGET, Limits

MARGIN = 0.02
"""Share of the memory kept for fragments, and kernels that are loaded later."""


def bytes_left(memory: DeviceMemory, activations: int, graphs: int) -> int:
    return memory.free - activations - graphs - int(memory.total * MARGIN)


MAX_MEASURED_TOKENS = 1 << 20
"""Tokens of the largest step that is measured: its rows and inputs are built in the memory of the host."""


@dataclass(frozen=True, slots=True)
class StepSizes:
    tokens: int = MAX_TOKEN_BUDGET
    sequences: int = Limits().max_running

    def possible(self, context_length: int, slots: int) -> StepSizes:
        """Limit the sizes to what can occur: a context per sequence, a slot per token. Raises InvalidConfig."""
        sequences = min(self.sequences, slots)
        tokens = min(self.tokens, sequences * context_length, slots)
        for field, most, value in (
            ("max_running", sequences, self.sequences),
            ("token_budget", tokens, self.tokens),
        ):
            if most > MAX_MEASURED_TOKENS:
                raise InvalidConfig(
                    field, f"at most {MAX_MEASURED_TOKENS} to measure the largest step without kv_bytes", value
                )
        return StepSizes(tokens, sequences)


def largest_steps(sizes: StepSizes, context_length: int, block_size: int, groups: int) -> Sequence[StepPlan]:
    """Plans that need most memory: prompts of the most tokens, and a drawn token of each of the most sequences.

    All rows share blocks 0 to ``blocks_of_largest_steps`` - 1.
    """
    longest = min(sizes.tokens, context_length)
    blocks = (array("i", range(-(-longest // block_size))),) * groups

    def prompt(length: int) -> Row:
        return Row(Request("memory", (0,) * length), (0,) * length, 0, length, blocks, True)

    count, rest = divmod(sizes.tokens, longest)
    prompts = [prompt(longest)] * count + ([prompt(rest)] if rest else [])
    drawn = Request("memory", (0,), sampling=SamplingParams(temperature=1.0, seed=0), logprobs=1)
    decodes = [Row(drawn, (0,), 0, 1, blocks, True, SamplerState(drawn))] * sizes.sequences
    return StepPlan(tuple(prompts), sizes.tokens), StepPlan(tuple(decodes), len(decodes))


def blocks_of_largest_steps(sizes: StepSizes, context_length: int, block_size: int) -> int:
    return -(-min(sizes.tokens, context_length) // block_size)


def choose(measure: Callable[[Callable[[], object]], int], steps: Callable[[], object], sizes: StepSizes) -> int:
    try:
        left = measure(steps)
    except torch.OutOfMemoryError as error:
        limit = f"less, or a token_budget below {sizes.tokens}: the largest steps exhaust the memory of the device"
        raise InvalidConfig("max_running", limit, sizes.sequences) from error
    if left < 1:
        raise InvalidConfig("kv_bytes", "memory beside the weights and the activations of a step", f"{left} bytes free")
    return left
