"""Rotary scaling that depends on length, frozen.

Some models (``longrope``, ``dynamic``) choose their frequencies by the longest position of a whole pass, so one
long sequence would change its neighbours. The served window decides once and for all instead; it is therefore
part of the layout.
"""

from __future__ import annotations

from typing import Any

import torch

_MOVING = ("dynamic", "longrope")
_EXTENDED = ("yarn", "llama3")
"""Scalings for which transformers takes `original_max_position_embeddings` for the length before scaling, and whose
frequencies are the same for every length."""


def reach(config: Any, positions: int) -> int:
    """The longest context, in tokens, that a text ``config`` with ``max_position_embeddings`` of ``positions`` is for.

    Checkpoints differ in what that number says of a scaled rotary embedding: the length before scaling, or after it.
    """
    scaling, factor = _scaling(config)
    if scaling.get("rope_type") in ("dynamic", "linear"):
        return int(positions * factor)
    return max(positions, int(factor * (scaling.get("original_max_position_embeddings") or 0)))


def default_length(config: Any, positions: int) -> int:
    """The context length that is served unless another is asked for, as routers read it (runtime/model_files.py):
    ``reach`` where the frequencies are the same for every length and the length before scaling is known; else
    ``positions``."""
    scaling, _ = _scaling(config)
    return reach(config, positions) if scaling.get("rope_type") in _EXTENDED else positions


def _scaling(config: Any) -> tuple[dict[str, Any], float]:
    """The parameters of the rotary embedding, and by how much it is scaled."""
    scaling = getattr(config, "rope_parameters", None) or {}
    return scaling, float(scaling.get("factor") or 1.0)


def freeze(model: torch.nn.Module, context_length: int) -> None:
    """Fix every length-dependent rotary embedding of ``model`` at the frequencies of ``window`` positions."""
    for module in map(_untyped, model.modules()):
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _moves(kinds):
            _settle(module, context_length, None)
            module.rope_type = "default"
        elif isinstance(kinds, dict) and any(_moves(kind) for kind in kinds.values()):
            for layer_type in [name for name, kind in kinds.items() if _moves(kind)]:
                _settle(module, context_length, layer_type)
            module.rope_type = {name: "default" if _moves(kind) else kind for name, kind in kinds.items()}


def _untyped(module: Any) -> Any:
    """torch types a module's plain attributes as tensors."""
    return module


def _moves(kind: str) -> bool:
    return any(name in kind for name in _MOVING)


def _settle(module: Any, context_length: int, layer_type: str | None) -> None:
    """Let the module see the last position of the window once, as transformers would."""
    device = next(buffer for buffer in module.buffers()).device
    options = {} if layer_type is None else {"layer_type": layer_type}
    module(torch.zeros(1, device=device), torch.tensor([[context_length - 1]], device=device), **options)
