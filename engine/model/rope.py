"""Freezes rotary scaling that depends on length.

Some models (``longrope``, ``dynamic``) choose frequencies by the longest position of a pass, so one long sequence would
change the others. The served context length decides instead.
"""

from __future__ import annotations

from typing import Any

import torch

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def freeze(model: torch.nn.Module, context_length: int) -> None:
    for module in map(_untyped, model.modules()):
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            _freeze_module(module, context_length, None)
            module.rope_type = "default"
        elif isinstance(kinds, dict) and any(_depends_on_length(kind) for kind in kinds.values()):
            for layer_type in [name for name, kind in kinds.items() if _depends_on_length(kind)]:
                _freeze_module(module, context_length, layer_type)
            module.rope_type = {name: "default" if _depends_on_length(kind) else kind for name, kind in kinds.items()}


def _untyped(module: Any) -> Any:
    """Hide the type, as torch declares a module's attributes as tensors."""
    return module


def _depends_on_length(kind: str) -> bool:
    return any(name in kind for name in _LENGTH_DEPENDENT)


def _freeze_module(module: Any, context_length: int, layer_type: str | None) -> None:
    """Call the module with the last position, which sets its frequencies."""
    device = next(buffer for buffer in module.buffers()).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    module(torch.zeros(1, device=device), torch.tensor([[context_length - 1]], device=device), **options)
