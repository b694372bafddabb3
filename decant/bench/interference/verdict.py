from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from decant.bench.interference.configurations import SPLIT, UNCHUNKED, InterferenceOptions

_Row = Mapping[str, Any]

CLEAR = 0.9
"""A gap counts as shorter below this share."""


def sentence(rows: Sequence[_Row], options: InterferenceOptions) -> str:
    split = next(row for row in rows if row["name"] == SPLIT)
    unchunked = next(row for row in rows if row["name"] == UNCHUNKED)
    best = best_mixed(rows)
    during = f"while {options.prompt_tokens:,} tokens arrive beside {options.running} answers"
    gaps = (
        f"{during}, their longest gap is {_ms(split['longest_gap_ms'])} with the split, "
        f"{_ms(best['longest_gap_ms'])} with {best['name']} and {_ms(unchunked['longest_gap_ms'])} unchunked"
    )
    first = f"the prompt's first token takes {_ms(split['ttft_ms'])} instead of {_ms(best['ttft_ms'])}"
    rate = (
        f"the answers get {_rate(split['output_throughput_before'])} instead of "
        f"{_rate(best['output_throughput_before'])} tokens/s before it and {_rate(split['output_throughput'])} instead "
        f"of {_rate(best['output_throughput'])} meanwhile"
    )
    return f"{gaps}; with the split {first}, and {rate}: {_choice(split, best)}"


def best_mixed(rows: Sequence[_Row]) -> _Row:
    return min((row for row in rows if row["mixed"]), key=lambda row: float(row["longest_gap_ms"]))


def _choice(split: _Row, best: _Row) -> str:
    shorter = split["longest_gap_ms"] < CLEAR * best["longest_gap_ms"]
    faster = split["ttft_ms"] < CLEAR * best["ttft_ms"]
    if shorter and faster:
        return "the split is better in both"
    if not shorter:
        return f"mixed workers are the better choice here ({best['name']})"
    allowed = _ms(best["longest_gap_ms"])
    return f"mixed workers are the better choice where gaps of {allowed} are acceptable, the split where they are not"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"


def _rate(tokens: float) -> str:
    return f"{tokens:,.0f}" if tokens >= 100 else f"{tokens:.3g}"
