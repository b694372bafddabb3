"""KV cache: what fits beside the weights."""

from __future__ import annotations

from dataclasses import dataclass

from decant.plan.errors import InvalidPlan
from decant.plan.quantities import show_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """Memory of one worker in bytes; `share` of `memory` is for weights and KV cache, the rest for activations.

    Blocks are allocated whole: a sequence takes its length rounded up to `block_size` tokens.
    """

    memory: int
    weights: int
    kv_token: int
    share: float = 0.9
    block_size: int = 16

    @property
    def kv_bytes(self) -> int:
        return max(0, int(self.memory * self.share) - self.weights)

    @property
    def tokens(self) -> int:
        """Tokens that fit, in whole blocks."""
        return self.kv_bytes // (self.kv_token * self.block_size) * self.block_size

    def sequences(self, length: int) -> int:
        """Sequences of `length` tokens that fit at the same time."""
        return self.tokens // (-(-length // self.block_size) * self.block_size)

    def check(self, longest: int) -> None:
        """Raises InvalidPlan unless the weights and one sequence of `longest` tokens fit."""
        usable = int(self.memory * self.share)
        if self.weights >= usable:
            needed = show_bytes(self.weights / self.share)
            raise InvalidPlan(
                "memory",
                f"weights of {show_bytes(self.weights)} need a device of more than {needed} (of which {self.share:.0%} "
                "is usable), or --quantization int8 or int4",
                show_bytes(self.memory),
            )
        if not self.sequences(longest):
            bytes_needed = (self.weights + (longest + self.block_size) * self.kv_token) / self.share
            raise InvalidPlan(
                "memory",
                f"one sequence of {longest:,} tokens needs a device of {show_bytes(bytes_needed)}, --kv-dtype int8, "
                f"or at most {self.tokens:,} tokens",
                show_bytes(self.memory),
            )
