"""Figures of a run, with the keys of ``vllm bench serve`` and more.

ttft   sent -> first token              tpot   (e2el - ttft) / (tokens - 1), without requests of one token
e2el   sent -> last token               itl    every gap between two tokens, pooled
tps    tokens / e2el of a request       second_token   first token -> second token
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from decant.bench.records import Record
from decant.client.results import Receipt

PERCENTILES = (50, 90, 95, 99)
PHASES = ("queue", "prefill", "handoff", "decode_wait", "decode")

_Slos = Mapping[str, float]


def percentile(ordered: Sequence[float], percent: float) -> float:
    if not ordered:
        return 0.0
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(name: str, values: Sequence[float], scale: float = 1e3, unit: str = "_ms") -> dict[str, float]:
    ordered = sorted(value * scale for value in values)
    figures = {
        f"mean_{name}{unit}": fmean(ordered) if ordered else 0.0,
        f"median_{name}{unit}": percentile(ordered, 50),
        f"std_{name}{unit}": pstdev(ordered) if ordered else 0.0,
        f"max_{name}{unit}": ordered[-1] if ordered else 0.0,
    }
    return figures | {f"p{percent}_{name}{unit}": percentile(ordered, percent) for percent in PERCENTILES}


def meets(record: Record, slos: _Slos) -> bool:
    """Return whether a successful request meets all objectives, which are in seconds."""
    values = {"ttft": record.ttft, "tpot": record.tpot, "e2el": record.e2el}
    return all((value := values[name]) is None or value <= limit for name, limit in slos.items())


def summarise(records: Sequence[Record], slos: _Slos) -> dict[str, Any]:
    """Return the figures of a run; rates count from the first send to the last success."""
    done = [record for record in records if not record.error]
    duration = max((one.tokens[-1] for one in done), default=0.0) - min((one.sent for one in records), default=0.0)
    per_second: Callable[[float], float] = lambda count: count / duration if done else 0.0  # noqa: E731
    inputs, outputs = sum(one.prompt_tokens for one in done), sum(len(one.tokens) for one in done)
    good = sum(meets(one, slos) for one in done)
    return {
        "duration": duration if done else 0.0,
        "completed": len(done),
        "failed": len(records) - len(done),
        "errors_by_reason": dict(Counter(one.error for one in records if one.error)),
        "total_input_tokens": inputs,
        "total_cached_tokens": sum(one.cached_tokens for one in done),
        "total_output_tokens": outputs,
        "request_throughput": per_second(len(done)),
        "request_goodput": per_second(good) if slos else None,
        "slo_attainment": good / len(records) if slos and records else None,
        "output_throughput": per_second(outputs),
        "total_token_throughput": per_second(inputs + outputs),
        "max_output_tokens_per_s": _most_in_a_second(sorted(at for one in done for at in one.tokens)),
        "max_concurrent_requests": _most_at_once([(one.sent, one.tokens[-1]) for one in done]),
        **distribution("ttft", [one.ttft for one in done]),
        **distribution("tpot", [one.tpot for one in done if one.tpot is not None]),
        **distribution("itl", [gap for one in done for gap in one.itls]),
        **distribution("e2el", [one.e2el for one in done]),
        **distribution("second_token", [one.second_token for one in done if one.second_token is not None]),
        **distribution("tps", [len(one.tokens) / one.e2el for one in done], 1.0, ""),
        **distribution("send_lag", [one.sent - one.due for one in records]),
        **_phases([one.receipt for one in done if one.receipt is not None]),
    }


def details(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return lists by request, in seconds. ``spans``, of successes only, are sent, first and last token after the first
    send.
    """
    began = min((one.sent for one in records), default=0.0)
    return {
        "spans": [[at - began for at in (one.sent, one.tokens[0], one.tokens[-1])] for one in records if not one.error],
        "input_lens": [one.prompt_tokens for one in records],
        "output_lens": [len(one.tokens) for one in records],
        "start_times": [one.sent for one in records],
        "ttfts": [one.ttft if one.tokens else 0.0 for one in records],
        "itls": [one.itls for one in records],
        "errors": [one.error for one in records],
    }


def _most_in_a_second(ordered: Sequence[float]) -> float:
    most = first = 0
    for last, at in enumerate(ordered):
        while at - ordered[first] >= 1:
            first += 1
        most = max(most, last - first + 1)
    return float(most)


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    return max(accumulate(change for _, change in changes), default=0)


def _phases(receipts: Sequence[Receipt]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for phase in PHASES:
        values = [getattr(receipt, f"{phase}_ms") for receipt in receipts]
        figures |= distribution(phase, [value for value in values if value is not None], 1.0)
    return figures
