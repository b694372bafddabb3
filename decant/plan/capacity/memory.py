from __future__ import annotations

from dataclasses import dataclass

from decant.engine.kv_layout import KvLayout
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import show_bytes


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """Memory of one worker in bytes, of which `share` is for weights, adapters and KV cache."""

    memory: int
    weights: int
    layout: KvLayout
    share: float = 0.9
    adapters: int = 0

    @property
    def fixed(self) -> int:
        """Bytes beside the KV cache."""
        return self.weights + self.adapters

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def kv_token(self) -> int:
        """Bytes per token of all layers."""
        return self.layout.block_bytes * len(self.layout.groups) // self.block_size

    @property
    def kv_bytes(self) -> int:
        return max(0, int(self.memory * self.share) - self.fixed)

    @property
    def tokens(self) -> int:
        """Tokens that fit, of sequences shorter than any window."""
        return self.kv_bytes // (self.kv_token * self.block_size) * self.block_size

    def sequence_bytes(self, length: int) -> int:
        """Return the bytes of a sequence; a layer with a window keeps the window and the next block."""
        count = -(-length // self.block_size)
        blocks = sum(window.blocks_at_once(count, self.block_size) for window in self.layout.windows)
        return blocks * self.layout.block_bytes

    def sequences(self, length: int) -> int:
        return self.kv_bytes // self.sequence_bytes(length)

    def check(self, longest: int) -> None:
        """Raise InvalidPlan unless the weights and one sequence of `longest` tokens fit."""
        usable = int(self.memory * self.share)
        if self.fixed >= usable:
            needed = show_bytes(self.fixed / self.share)
            adapters = f" and adapters of {show_bytes(self.adapters)}" if self.adapters else ""
            raise InvalidPlan(
                "memory",
                f"weights of {show_bytes(self.weights)}{adapters} need a device of more than {needed} "
                f"(of which {self.share:.0%} is usable), or --quantization int8 or int4",
                show_bytes(self.memory),
            )
        if not self.sequences(longest):
            bytes_needed = (self.fixed + self.sequence_bytes(longest + self.block_size)) / self.share
            raise InvalidPlan(
                "memory",
                f"one sequence of {longest:,} tokens needs a device of {show_bytes(bytes_needed)}, --kv-dtype int8, "
                f"or at most {self.tokens:,} tokens",
                show_bytes(self.memory),
            )
