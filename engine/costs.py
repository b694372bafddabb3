"""What a step takes in seconds, said before it is run, and how much of a prompt fits in what is left of one.

    seconds = fixed + token x tokens + logits x rows of logits + pair x (query, key) pairs

                  keys: context      chunk
    queries of   [############## | #         ]     A chunk of n tokens behind c computed ones has
    the chunk    [############## | # #       ]     n c + n (n + 1) / 2 pairs: the same seconds hold
                 [############## | # # #     ]     fewer tokens, the longer the context.

Plain numbers: no clock, no device. ``calibration`` measures the costs of a device, ``StepTimePredictor`` corrects them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_GAIN = 0.2
_MOST_AT_ONCE = 1.5
"""A step that took more than so many times what was said, or less than its inverse, counts as if it were that."""


class StepWork(NamedTuple):
    """What a step, or a row of one, computes: ``logits`` rows of the output head, ``pairs`` of a query and a key."""

    tokens: int = 0
    logits: int = 0
    pairs: int = 0

    def plus(self, other: StepWork) -> StepWork:
        return StepWork(self.tokens + other.tokens, self.logits + other.logits, self.pairs + other.pairs)


NO_WORK = StepWork()


def chunk(context: int, tokens: int, *, explained: bool = False) -> StepWork:
    """``tokens`` of one sequence behind ``context`` computed ones. Its last one counts as sampled, for that is not
    known before it is cut; ``explained``: each has its logits made."""
    return StepWork(tokens, tokens if explained else 1, tokens * context + tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """Seconds for a step, a token, a row of logits and a (query, key) pair. Nothing is known of a device whose costs
    are all nought: then every chunk fits."""

    fixed: float = 0.0
    token: float = 0.0
    logits: float = 0.0
    pair: float = 0.0

    def seconds(self, work: StepWork) -> float:
        """Of a step of that much work."""
        return self.fixed + self.token * work.tokens + self.logits * work.logits + self.pair * work.pairs

    def fitting(self, seconds: float, context: int, most: int, *, explained: bool = False) -> int:
        """The most tokens of one chunk behind ``context`` that take at most ``seconds`` more; from 0 to ``most``."""
        left = seconds - (0.0 if explained else self.logits)
        if left <= 0:
            return 0
        # half x n^2 + slope x n = left, solved so that no term cancels and nought may stand anywhere
        half = self.pair / 2
        slope = self.token + (self.logits if explained else 0.0) + self.pair * context + half
        divisor = slope + math.sqrt(slope * slope + 4 * half * left)
        return most if 2 * left >= most * divisor else int(2 * left / divisor)


class StepTimePredictor:
    """A device's costs, and how far off they have been of late: ``factor`` for all, ``own`` once more for decodes.

        said = factor x (own x decodes + what prompts add)

    A step with prompts moves the first number, one of decodes alone the second: a fifth of the way, by at most 8 %. A
    machine that stood still for seconds counts as one slow step, one that became half as fast is known after ten.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self.costs = costs
        self.factor = self.own = 1.0

    def seconds(self, decodes: StepWork, prompts: StepWork = NO_WORK) -> float:
        """Of a step of that much work."""
        base = self.costs.seconds(decodes)
        return self.factor * (self.own * base + self.costs.seconds(decodes.plus(prompts)) - base)

    def fitting(self, seconds: float, context: int, most: int, *, explained: bool = False) -> int:
        """As ``StepCostModel.fitting``."""
        return self.costs.fitting(seconds / self.factor, context, most, explained=explained)

    def note(self, decodes: StepWork, prompts: StepWork, seconds: float) -> None:
        """A step of that work took so long."""
        said = self.seconds(decodes, prompts)
        if said <= 0:
            return
        off = min(max(seconds / said, 1 / _MOST_AT_ONCE), _MOST_AT_ONCE) ** _GAIN
        if prompts.tokens:
            self.factor *= off
        else:
            self.own *= off
