from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Parameters of a training run; two runs of a recipe on one machine agree bit for bit."""

    vocab_size: int = 4096
    hidden_size: int = 256
    layers: int = 4
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    mlp_size: int = 512
    context: int = 512
    long_context: int = 2048
    steps: int = 1000
    long_steps: int = 120
    tokens_per_step: int = 6144
    micro_batch_tokens: int = 2048
    warmup_steps: int = 40
    decay_fraction: float = 0.55
    muon_lr: float = 0.03
    adam_lr: float = 0.006
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0

    def learning_rate_factor(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return min(1.0, (self.steps - step) / (self.decay_fraction * self.steps))

    def window(self, step: int) -> int:
        return self.context if step < self.steps - self.long_steps else self.long_context


TINY = Recipe()

# 32 million parameters, weights of 65 MB, for a GPU (never timed on one); on two cores more than a day by estimate.
LARGE = Recipe(
    vocab_size=8192,
    hidden_size=512,
    layers=10,
    heads=8,
    kv_heads=2,
    head_dim=64,
    mlp_size=1408,
    steps=1200,
    long_steps=200,
    tokens_per_step=32768,
    micro_batch_tokens=32768,
    warmup_steps=60,
)

# Takes seconds. It learns almost nothing, but exercises the whole path from corpus to card.
TRIAL = Recipe(
    vocab_size=320,
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    mlp_size=64,
    context=32,
    long_context=64,
    steps=12,
    long_steps=4,
    tokens_per_step=128,
    micro_batch_tokens=64,
    warmup_steps=2,
)

PRESETS = {"tiny": TINY, "large": LARGE, "trial": TRIAL}
