"""Patches of transformers' objects that depend on object identity: all of them are in this file.

Each saves interpreter time between kernels; none changes bits, and a step without them is correct::

    LookaheadLayer    A call computes the fused layers that follow, too. Relies on transformers calling the layers in
                      order, each with the tensor that the one before returned. A layer returns its precomputed output
                      only for that tensor, unchanged, the same angles and the same step.
    _Layers           The full slice of a layer list, which models take in each step, is the list itself. Relies on
                      models not changing it.
    patch_rotation    An attention module calls its rotation as a global of its module. It gets a copy of its forward
                      with another global.
"""

from __future__ import annotations

from itertools import pairwise
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from decant.engine.cpu import fused_layer
from decant.engine.cpu.attention import NativeAttention
from decant.engine.cpu.fused_layer import NativeLayer
from decant.engine.cpu.fused_ops import Rotation, has_same_bits
from decant.engine.model.attention.interface import AttentionBackend, AttentionCall, current, next_layer
from decant.engine.model.decoder_layer import Angles, Forward

LOOKAHEAD_BYTES = 32 << 20

ROTATION = "apply_rotary_pos_emb"


class _Precomputed(NamedTuple):
    leader: LookaheadLayer
    hidden: torch.Tensor
    angles: Angles
    attention: AttentionBackend
    output: torch.Tensor

    def matches(self, hidden: torch.Tensor, angles: Any, attention: AttentionBackend | None) -> bool:
        return (
            hidden is self.hidden
            and hidden._version == 0
            and attention is self.attention
            and angles is not None
            and angles[0] is self.angles[0]
            and angles[1] is self.angles[1]
        )


class LookaheadLayer(NativeLayer):
    def __init__(self, kernels: ModuleType, original_forward: Forward, parts: Any, call: AttentionCall) -> None:
        super().__init__(kernels, original_forward, parts, call)
        self.follower: LookaheadLayer | None = None
        """Expected to be called next, with this layer's output."""
        self._precomputed: _Precomputed | None = None

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        precomputed, self._precomputed = self._precomputed, None
        if precomputed is not None:
            is_plain_call = not args and kwargs.get("past_key_values") is None
            if is_plain_call and precomputed.matches(hidden_states, kwargs.get("position_embeddings"), current()):
                next_layer()
                return precomputed.output
            precomputed.leader.follower = None
        return super().__call__(hidden_states, *args, **kwargs)

    def can_lead_to(self, other: LookaheadLayer) -> bool:
        return (self.dtype, self.width, self.hidden) == (other.dtype, other.width, other.hidden)

    def _compute(self, hidden: torch.Tensor, angles: Angles, attention: NativeAttention) -> torch.Tensor:
        layers = self._with_followers(LOOKAHEAD_BYTES // hidden.nbytes)
        with torch.inference_mode(False):  # a tensor with a version counter
            memory = torch.empty(len(layers), *hidden.shape, dtype=self.dtype)
        self._run(layers, hidden, angles, attention, memory)
        outputs = memory.unbind()
        for (leader, layer), (layer_input, output) in zip(pairwise(layers), pairwise(outputs), strict=True):
            layer._precomputed = _Precomputed(leader, layer_input, angles, attention, output)
        return outputs[0]

    def _with_followers(self, most: int) -> list[LookaheadLayer]:
        layers = [self]
        while len(layers) < most and (follower := layers[-1].follower) is not None:
            if follower._precomputed is not None:  # the last precomputed output was not used
                layers[-1].follower = None
            else:
                layers.append(follower)
        return layers


def fuse_with_lookahead(model: nn.Module, dtype: torch.dtype, kernels: ModuleType) -> None:
    layers = fused_layer.fuse(model, dtype, kernels, LookaheadLayer)
    for layer, follower in pairwise(layers):
        if layer.can_lead_to(follower):
            layer.follower = follower
    for module in model.modules():
        if type(module) is nn.ModuleList and any(isinstance(child.forward, NativeLayer) for child in module):
            module.__class__ = _Layers


class _Layers(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return self if index == slice(None, len(self)) else super().__getitem__(index)


def patch_rotation(model: nn.Module, dtype: torch.dtype, kernels: ModuleType) -> None:
    for module in model.modules():
        forward, width = type(module).forward, getattr(module, "head_dim", None)
        if not isinstance(forward, FunctionType) or ROTATION not in forward.__code__.co_names:
            continue
        original = forward.__globals__[ROTATION]
        rotation = Rotation(kernels, original)
        if isinstance(width, int) and has_same_bits(rotation, original, width, dtype):
            module.forward = MethodType(_with_global(forward, ROTATION, rotation), module)


def _with_global(function: FunctionType, name: str, value: object) -> FunctionType:
    namespace = {**function.__globals__, name: value}
    copy = FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
