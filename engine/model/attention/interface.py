"""Attention, plugged into transformers' own modelling code through its attention interface.

The registry is one per process, and some architectures pass no keywords to attention, so the registered function calls
the thread's current ``AttentionBackend``.
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
    """One layer's call; ``layer`` counts calls within a pass of the model from 0.

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
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Output [1, T, heads, value dim] in the query's dtype."""
        ...


class _Current(threading.local):
    backend: AttentionBackend | None = None
    calls: int = 0


_current = _Current()


@contextmanager
def attending(backend: AttentionBackend) -> Iterator[None]:
    _current.backend, _current.calls = backend, 0
    try:
        yield
    finally:
        _current.backend = None


def calls_made() -> int:
    return _current.calls


def current() -> AttentionBackend | None:
    return _current.backend


def next_layer() -> int:
    """Number of the layer that calls attention now; advances the count."""
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
    backend = _current.backend
    if backend is None:
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
    return backend.attend(call), None


AttentionInterface.register(NAME, _forward)
