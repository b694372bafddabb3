"""Pytest plugin of `make sanitize`: the kernels are those of the folder that DECANT_SANITIZED names."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

import torch  # noqa: F401  first, as decant.engine.cpu.kernels.loader does

for path in sorted(Path(os.environ["DECANT_SANITIZED"], "decant/engine/cpu/kernels").glob("*.so")):
    name = f"decant.engine.cpu.kernels.{path.name.partition('.')[0]}"
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
