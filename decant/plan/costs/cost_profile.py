"""Measured costs of a worker on one machine, in seconds, as JSON.

{"model": "Qwen2.5-0.5B", "costs": {"fixed": 0.0004, "token": 0.0012, "logits": 0.002, "pair": 1.1e-07}}

{"model": "Qwen2.5-0.5B", "prefill": {"fixed": ...}, "decode": {"fixed": ...}, "latency": 0.005, "handoff": 0.01,
 "sending": 2e-5, "contention": {"prefill": 1.4, "decode": 1.1, "handoff": 2.0}}

The first format has costs of the engine alone, the second those that clients see, from `decant bench calibrate`. Output
of `decant plan --json`, with its "profile", is accepted too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from decant.engine.costs import StepCostModel
from decant.plan.costs.overheads import NO_OVERHEADS, Contention, Overheads
from decant.plan.errors import InvalidPlan

_KV_BYTES = 256 << 20
"""Steps that do not fit are not measured."""
_COSTS = ("fixed", "token", "logits", "pair")


@dataclass(frozen=True, slots=True)
class Profile:
    prefill: StepCostModel
    decode: StepCostModel
    overheads: Overheads = NO_OVERHEADS
    model: str = ""
    dtype: str = ""
    threads: int = 0

    def document(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "dtype": self.dtype,
            "threads": self.threads,
            "prefill": asdict(self.prefill),
            "decode": asdict(self.decode),
            **asdict(self.overheads),
        }


def read(path: Path) -> Profile:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidPlan("--calibrate", f"`measure` or a readable file ({error.strerror})", path) from None
    except (ValueError, RecursionError) as error:
        raise InvalidPlan("--calibrate", f"a JSON object ({error})", path) from None
    if isinstance(document, dict) and isinstance(document.get("profile"), dict):
        document = document["profile"]
    if not isinstance(document, dict):
        raise InvalidPlan("--calibrate", "a JSON object", path)
    return from_document(document)


def from_document(document: dict[str, Any]) -> Profile:
    names = ("costs", "costs") if "costs" in document else ("prefill", "decode")
    prefill, decode = (_costs(document, name) for name in names)
    contention = document.get("contention", {})
    if not isinstance(contention, dict):
        raise InvalidPlan("--calibrate contention", "prefill, decode and handoff", contention)
    return Profile(
        prefill,
        decode,
        Overheads(
            _number(document, "latency", 0.0),
            _number(document, "handoff", 0.0),
            _number(document, "sending", 0.0),
            Contention(*(_number(contention, name, 1.0, "contention.") for name in ("prefill", "decode", "handoff"))),
        ),
        str(document.get("model", "")),
        str(document.get("dtype", "")),
        _threads(document.get("threads") or 0),
    )


def _threads(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidPlan("--calibrate threads", "a whole number from 0", value)
    return value


def _costs(document: dict[str, Any], name: str) -> StepCostModel:
    costs = document.get(name)
    if not isinstance(costs, dict):
        raise InvalidPlan("--calibrate", 'a file with "costs", or with "prefill" and "decode"', costs)
    values = {key: _number(costs, key, None, f"{name}.") for key in _COSTS}
    if not sum(values.values()):
        raise InvalidPlan(f"--calibrate {name}", "a cost above 0", costs)
    return StepCostModel(**values)


def _number(values: dict[str, Any], name: str, least: float | None, parent: str = "") -> float:
    value: Any = values.get(name, least)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (least or 0.0) <= value <= sys.float_info.max:
        raise InvalidPlan(f"--calibrate {parent}{name}", f"a number from {least or 0:g}", value)
    return float(value)


def measure(model: str, dtype: str, threads: int) -> Profile:
    """Measure step costs of the engine on this machine's CPU, with the worker's packages. Raises ModelRefused and
    InvalidConfig.
    """
    import torch
    from transformers.utils import logging

    from decant.engine.loading import load
    from decant.engine.model import calibration
    from decant.engine.model.model import ModelConfig

    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    device = load(ModelConfig(model, dtype=dtype, device="cpu", kv_bytes=_KV_BYTES))
    served_as = str(device.model.dtype).removeprefix("torch.")
    costs = calibration.measure(device)
    return Profile(costs, costs, NO_OVERHEADS, Path(model).resolve().name, served_as, threads)
