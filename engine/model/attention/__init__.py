"""Attention, plugged into transformers' own modelling code through its attention interface.

The registry of that interface is one per process, and some architectures pass no keywords down to attention. So
the function registered here only hands over to whatever the calling thread has made current: a step's context
while serving, a recorder while a model is being learnt. Two engines on two threads never see each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

NAME = "decant"


class AttentionCall(NamedTuple):
    """One layer's call, calls counted from 0 within a pass of the model.

    query [1, heads, T, key dim], key [1, kv heads, T, key dim], value [1, kv heads, T, value dim]; ``sinks``
    [heads] takes part in the softmax and carries no value; ``softcap`` bounds scores before masking.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    softcap: float | None
    sinks: torch.Tensor | None
    mask: Any


class AttentionBackend(Protocol):
    """What a thread makes current around a call of the model."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """-> [1, T, heads, value dim]"""
        ...


class _Current(threading.local):
    attender: AttentionBackend | None = None
    calls: int = 0


_current = _Current()


@contextmanager
def attending(attender: AttentionBackend) -> Iterator[None]:
    """Every attention call of this thread goes to ``attender`` until the block ends."""
    _current.attender, _current.calls = attender, 0
    try:
        yield
    finally:
        _current.attender = None


def calls_made() -> int:
    """Attention calls of this thread since ``attending`` began."""
    return _current.calls


def current() -> AttentionBackend | None:
    """What this thread made current."""
    return _current.attender


def next_layer() -> int:
    """The layer whose attention is called now; the next call is the next layer's."""
    _current.calls += 1
    return _current.calls - 1


def _forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    attender = _current.attender
    if attender is None:
        raise RuntimeError("the attention named 'decant' was called outside an engine's step")
    scaling = options.get("scaling")
    call = AttentionCall(
        layer=next_layer(),
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        mask=attention_mask,
    )
    return attender.attend(call), None


AttentionInterface.register(NAME, _forward)
