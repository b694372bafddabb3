"""A measured profile: the step costs of one worker on one machine, as JSON.

{"model": "Qwen2.5-0.5B", "dtype": "bfloat16", "threads": 1,
 "costs": {"fixed": 0.0004, "token": 0.0012, "logits": 0.002, "pair": 1.1e-07}}       seconds

A worker logs the same four costs as `measured`. `decant plan --json` holds its profile under "profile", so that its
output is accepted again.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decant.engine.costs import StepCostModel
from decant.plan.errors import InvalidPlan

_KV_BYTES = 256 << 20
"""Enough for eight sequences of 1,024 tokens at 32 KiB a token; steps that do not fit are not measured."""
_COSTS = ("fixed", "token", "logits", "pair")


@dataclass(frozen=True, slots=True)
class Profile:
    """Costs, and what they were measured with."""

    costs: StepCostModel
    model: str = ""
    dtype: str = ""
    threads: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def read(path: Path) -> Profile:
    """Raises InvalidPlan."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidPlan("--calibrate", f"`measure` or a readable file ({error.strerror})", path) from None
    except ValueError as error:
        raise InvalidPlan("--calibrate", f"a JSON object ({error})", path) from None
    if isinstance(document, dict) and isinstance(document.get("profile"), dict):
        document = document["profile"]
    costs = document.get("costs") if isinstance(document, dict) else None
    if not isinstance(costs, dict):
        raise InvalidPlan("--calibrate", 'a file with "costs"', path)
    return Profile(
        StepCostModel(**{name: _seconds(costs, name) for name in _COSTS}),
        str(document.get("model", "")),
        str(document.get("dtype", "")),
        document.get("threads") or 0,
    )


def _seconds(costs: dict[str, Any], name: str) -> float:
    value: Any = costs.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > 0 or (value == 0 and name != "token")):
        return float(value)
    limit = "a number of seconds above 0" if name == "token" else "a number of seconds from 0"
    raise InvalidPlan(f"--calibrate costs.{name}", limit, value)


def measure(model: str, dtype: str, threads: int) -> Profile:
    """Load the model on this machine and measure its steps, as a worker does when it starts. Raises ModelRefused.

    Needs the worker's packages.
    """
    import torch
    from transformers.utils import logging

    from decant.engine.model import calibration
    from decant.engine.model.model import ModelConfig, load

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    device = load(ModelConfig(model, dtype=dtype, device="cpu", kv_bytes=_KV_BYTES))
    served_as = str(device.model.dtype).removeprefix("torch.")
    return Profile(calibration.measure(device), Path(model).resolve().name, served_as, threads)
