from __future__ import annotations

from typing import Any

_EXTENDED = ("yarn", "llama3")
"""Same frequencies for every length; `original_max_position_embeddings` is the length before scaling."""


def max_positions(config: Any, positions: int) -> int:
    """Length after scaling. In some checkpoints ``positions`` (``max_position_embeddings``) is the length before it."""
    scaling, factor = _scaling(config)
    if scaling.get("rope_type") in ("dynamic", "linear"):
        return int(positions * factor)
    return max(positions, int(factor * (scaling.get("original_max_position_embeddings") or 0)))


def default_length(config: Any, positions: int) -> int:
    """Default context length. Routers compute the same (runtime/model_files.py)."""
    scaling, _ = _scaling(config)
    return max_positions(config, positions) if scaling.get("rope_type") in _EXTENDED else positions


def _scaling(config: Any) -> tuple[dict[str, Any], float]:
    scaling = getattr(config, "rope_parameters", None) or {}
    return scaling, float(scaling.get("factor") or 1.0)
