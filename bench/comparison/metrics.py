"""Figures from a timeline of tokens; keys as in the output of ``vllm bench serve``.

ttft   sent -> first token              tpot   (e2el - ttft) / (tokens - 1), without requests of one token
e2el   sent -> last token               itl    every gap between two tokens of a request, pooled
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from decant.bench.records import TokenTimes


@dataclass(frozen=True, slots=True)
class Served(TokenTimes):
    id: str
    input_len: int
    sent: float
    tokens: Sequence[float]


def summarise(served: Sequence[Served]) -> dict[str, Any]:
    duration = max(one.tokens[-1] for one in served) - min(one.sent for one in served)
    inputs, outputs = sum(one.input_len for one in served), sum(len(one.tokens) for one in served)
    summary: dict[str, Any] = {
        "duration": duration,
        "completed": len(served),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(served) / duration,
        "output_throughput": outputs / duration,
        "total_token_throughput": (inputs + outputs) / duration,
    }
    summary |= distribution("ttft", [one.ttft for one in served])
    summary |= distribution("tpot", [one.tpot for one in served if one.tpot is not None])
    summary |= distribution("itl", [gap for one in served for gap in one.itls])
    summary |= distribution("e2el", [one.e2el for one in served])
    return {**summary, **_disturbed(served), "peak_rss_bytes": peak_rss(), "requests": details(served)}


def _disturbed(served: Sequence[Served]) -> dict[str, float | None]:
    last = max(served, key=lambda one: one.sent)
    if last.sent == min(one.sent for one in served):
        return {}
    gaps = [gap for one in served if one is not last for gap in _gaps_after(one.tokens, last.sent)]
    return {"last_ttft_ms": last.ttft * 1e3, "max_itl_after_last_ms": max(gaps) * 1e3 if gaps else None}


def _gaps_after(tokens: Sequence[float], since: float) -> list[float]:
    return [after - before for before, after in pairwise(tokens) if after > since]


def peak_rss() -> int:
    """Peak resident bytes; getrusage would include the parent's memory before the exec."""
    return resident("VmHWM")


def resident(field: str = "VmRSS") -> int:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def details(served: Sequence[Served]) -> list[dict[str, Any]]:
    return [
        {
            "id": one.id,
            "input_len": one.input_len,
            "output_len": len(one.tokens),
            "sent_ms": one.sent * 1e3,
            "ttft_ms": one.ttft * 1e3,
            "e2el_ms": one.e2el * 1e3,
            "max_itl_ms": max(one.itls, default=0.0) * 1e3,
        }
        for one in served
    ]


def distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    values = np.asarray(seconds if len(seconds) else [0.0]) * 1e3
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        f"p99_{name}_ms": float(np.percentile(values, 99)),
        f"max_{name}_ms": float(values.max()),
    }
