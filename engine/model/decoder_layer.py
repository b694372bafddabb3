"""What the kernels of every device need to compute a whole decoder layer: its parts, its calls, and a trial.

A layer is fused if it has the expected parts and a trial agrees. Its new ``forward`` passes calls that it does not
support to the original.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from decant.engine.kv_layout import KvFormat, KvLayout, LayerSpec
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall, attending, current
from decant.engine.model.attention.masks import AttentionWindow
from decant.engine.model.kv_store import KvStore
from decant.engine.model.step_batch import FlatBatch, flatten
from decant.engine.plan import Row
from decant.engine.request import Request

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "q_norm", "k_norm", "post_attention_layernorm")
OPTIONAL = ("q_norm", "k_norm")

TRIAL_BLOCK = 16
"""Tokens of a trial's block, unless the kernels are compiled for others."""

TRIAL_POSITION = 1 << 20
"""First position of a trial: a layer that scales distant tokens differs."""

Forward = Callable[..., Any]
Angles = tuple[torch.Tensor, torch.Tensor]
"""cos and sin [1, T, head width]."""

MakeAttention = Callable[[KvStore, Sequence[AttentionWindow], FlatBatch], AttentionBackend]
Attention = TypeVar("Attention", bound=AttentionBackend)
Layer = TypeVar("Layer", bound="FusedLayer[Any]")


def find_parts(module: nn.Module) -> tuple[list[nn.Module | None], list[nn.Module]]:
    """Return a layer's ``NORMS``, None for a missing ``OPTIONAL`` one, and its ``LINEARS``. Raises LookupError."""
    children = dict(module.named_children())
    parts = {name: part for child in children.values() for name, part in child.named_children()} | children
    norms = [parts.get(name) if name in OPTIONAL else parts[name] for name in NORMS]
    return norms, [parts[name] for name in LINEARS]


def head_width(module: nn.Module) -> int:
    """Width of a layer's heads; 0 if no child names one."""
    widths: list[Any] = [getattr(part, "head_dim", None) for part in module.children()]
    return next((width for width in widths if isinstance(width, int)), 0)


class FusedLayer(ABC, Generic[Attention]):
    attention: type[Attention]
    """With which a step must attend."""

    def __init__(self, original_forward: Forward, call: AttentionCall) -> None:
        self.original_forward = original_forward
        self.dtype, self.width = call.query.dtype, call.query.shape[3]

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        attention, angles = current(), kwargs.get("position_embeddings")
        if (
            args
            or angles is None
            or kwargs.get("past_key_values") is not None
            or not isinstance(attention, self.attention)
            or not self._fits(hidden_states, *angles)
        ):
            return self.original_forward(hidden_states, *args, **kwargs)
        return self._compute(hidden_states, angles, attention)

    @abstractmethod
    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: Attention) -> torch.Tensor:
        """Compute a call that ``_fits``: hidden states [1, T, hidden] in and out."""

    def _fits(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
        return (
            len(hidden) == 1
            and cos.shape == sin.shape == (1, hidden.shape[1], self.width)
            and hidden.dtype == cos.dtype == sin.dtype == self.dtype
            and hidden.is_contiguous()
        )


class _RecordingAttention:
    def __init__(self, attention: AttentionBackend, spec: LayerSpec) -> None:
        self._attention = attention
        self._spec = spec
        self.call: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        spec = self._spec
        widths = call.query.shape[3], call.key.shape[3], call.value.shape[3]
        if widths != (spec.key_dim, spec.key_dim, spec.value_dim):
            raise ValueError("heads of another width")
        if not call.key.shape[1] == call.value.shape[1] == spec.kv_heads or call.query.shape[1] % spec.kv_heads:
            raise ValueError("another number of heads")
        self.call = call
        return self._attention.attend(call)


class TrialResult(NamedTuple):
    output: Any
    blocks: torch.Tensor
    call: AttentionCall | None  # of an original forward


class Trial:
    """Step of one sequence through one layer, with a random row of each of the ``scales``."""

    def __init__(
        self,
        scales: Sequence[float],
        hidden: int,
        spec: LayerSpec,
        make_attention: MakeAttention,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        count, generator = len(scales), torch.Generator().manual_seed(0)
        rows = torch.randn(1, count, hidden, generator=generator) * torch.tensor(scales)[:, None]
        angles = [torch.randn(1, count, spec.key_dim, generator=generator) for _ in range(2)]
        self.rows = rows.to(device, dtype)
        self._angles = tuple(part.to(device, dtype) for part in angles)
        self._positions = TRIAL_POSITION + torch.arange(count, device=device)[None]
        self._spec = spec
        self._make_attention = make_attention
        tokens = list(range(count))
        self.block_size = TRIAL_BLOCK
        self._step = [Row(Request("trial", tuple(tokens)), tokens, 0, count, (array("i", [0]),), True)]

    @torch.inference_mode()
    def fuse(
        self,
        original: Forward,
        make: Callable[[AttentionCall], Layer],
        agrees: Callable[[TrialResult, TrialResult], bool],
        unsupported: tuple[type[Exception], ...],
    ) -> Layer | None:
        """Return the layer that ``make`` makes if its result agrees with the original's.

        Return None if the original raises ``unsupported`` or makes no attention call that kernels compute.
        """
        try:
            expected = self.run(original)
        except unsupported:
            return None
        call = expected.call
        if not isinstance(expected.output, torch.Tensor) or call is None or call.sinks is not None:
            return None
        layer = make(call)
        return layer if agrees(self.run(layer), expected) else None

    def run(self, forward: Forward) -> TrialResult:
        layout = KvLayout((self._spec,), self.block_size, KvFormat(self.rows.dtype.itemsize))
        store = KvStore(layout, 1, self.rows.dtype, self.rows.device)
        attention = self._make_attention(
            store, [AttentionWindow()], flatten(self._step, self.block_size, store.null_block)
        )
        recording = _RecordingAttention(attention, self._spec)
        kwargs = {"attention_mask": None, "position_ids": self._positions, "position_embeddings": self._angles}
        with attending(attention if isinstance(forward, FusedLayer) else recording):
            output = forward(self.rows, **kwargs, use_cache=False)
        return TrialResult(output, store.blocks, recording.call)
