"""Cost model of a step.

    seconds = fixed + token x tokens + logits x rows of logits + pair x (query, key) pairs

                  keys: context      chunk
    queries of   [############## | #         ]     A chunk of n tokens behind c computed ones has
    the chunk    [############## | # #       ]     n c + n (n + 1) / 2 pairs.
                 [############## | # # #     ]

``model.calibration`` measures the costs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_GAIN = 0.2
_MAX_RATIO = 1.5


class StepWork(NamedTuple):
    tokens: int = 0
    logits: int = 0
    pairs: int = 0

    def plus(self, other: StepWork) -> StepWork:
        return StepWork(self.tokens + other.tokens, self.logits + other.logits, self.pairs + other.pairs)


NO_WORK = StepWork()


def chunk(context: int, tokens: int, *, all_logits: bool = False) -> StepWork:
    return StepWork(tokens, tokens if all_logits else 1, tokens * context + tokens * (tokens + 1) // 2)


@dataclass(frozen=True, slots=True)
class StepCostModel:
    """Seconds per step, token, row of logits and pair; all zeros if unknown: then every chunk fits."""

    fixed: float = 0.0
    token: float = 0.0
    logits: float = 0.0
    pair: float = 0.0

    def seconds(self, work: StepWork) -> float:
        return self.fixed + self.token * work.tokens + self.logits * work.logits + self.pair * work.pairs

    def max_tokens_within(self, seconds: float, context: int, max_tokens: int, *, all_logits: bool = False) -> int:
        left = seconds - (0.0 if all_logits else self.logits)
        if left <= 0:
            return 0
        # Root of half x n^2 + slope x n = left, in the form that cancels no terms and allows zero coefficients.
        half = self.pair / 2
        slope = self.token + (self.logits if all_logits else 0.0) + self.pair * context + half
        divisor = slope + math.sqrt(slope * slope + 4 * half * left)
        return max_tokens if 2 * left >= max_tokens * divisor else int(2 * left / divisor)


class StepTimePredictor:
    """A cost model that corrects itself.

        predicted = factor x (decode_factor x decodes + what prompts add)

    A step with prompts corrects ``factor``, one without corrects ``decode_factor``, by at most 8.5 %.
    """

    def __init__(self, costs: StepCostModel) -> None:
        self.costs = costs
        self.factor = self.decode_factor = 1.0

    def seconds(self, decodes: StepWork, prompts: StepWork = NO_WORK) -> float:
        base = self.costs.seconds(decodes)
        return self.factor * (self.decode_factor * base + self.costs.seconds(decodes.plus(prompts)) - base)

    def max_tokens_within(self, seconds: float, context: int, max_tokens: int, *, all_logits: bool = False) -> int:
        return self.costs.max_tokens_within(seconds / self.factor, context, max_tokens, all_logits=all_logits)

    def note(self, decodes: StepWork, prompts: StepWork, seconds: float) -> None:
        predicted = self.seconds(decodes, prompts)
        if predicted <= 0:
            return
        ratio = min(max(seconds / predicted, 1 / _MAX_RATIO), _MAX_RATIO) ** _GAIN
        if prompts.tokens:
            self.factor *= ratio
        else:
            self.decode_factor *= ratio
