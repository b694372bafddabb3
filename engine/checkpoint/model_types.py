"""Model types that transformers knows, without importing it, which takes seconds.

A type is known if it is in quotes in the files where transformers registers configurations. If its version has no such
files, every type passes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from decant.engine.errors import ModelRefused

_REGISTRIES = ("auto_mappings.py", "configuration_auto.py")


def check(name: str, config: Mapping[str, Any]) -> None:
    """Refuse a model type that transformers does not know. Raises ModelRefused."""
    kind, registries = config.get("model_type"), _registries()
    if registries and not (isinstance(kind, str) and kind and f'"{kind}"' in registries):
        raise refusal(name, config)


def refusal(name: str, config: Mapping[str, Any]) -> ModelRefused:
    kind = config.get("model_type")
    if "auto_map" in config:
        reason = "its configuration requires remote code (auto_map), which is never run"
    else:
        reason = "transformers has no code for it; no remote code is run here"
    return ModelRefused(f"{kind or 'an unnamed model type'} ({name})", reason)


@cache
def _registries() -> str:
    package = importlib.util.find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    folder = Path(package.origin).parent / "models" / "auto"
    return "".join((folder / name).read_text(encoding="utf-8") for name in _REGISTRIES if (folder / name).is_file())
