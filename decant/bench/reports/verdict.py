from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}


CACHED_SHARE = 0.1
"""Of the prompt tokens: from here on the prefix cache decides the figures, and the sentence says so."""


def missed(summary: Mapping[str, Any], slos: Mapping[str, float]) -> list[str]:
    if summary["failed"]:
        return list(slos)
    return [name for name, limit in slos.items() if summary[f"p99_{name}_ms"] > limit * 1e3]


def bottleneck(summary: Mapping[str, Any], slos: Mapping[str, float]) -> str:
    if summary["failed"]:
        reason, count = max(summary["errors_by_reason"].items(), key=lambda pair: pair[1])
        return f"{count} of {summary['failed'] + summary['completed']} requests fail ({reason})"
    misses = missed(summary, slos)
    if "ttft" in misses:
        waits = summary["p99_queue_ms"] >= summary["p99_prefill_ms"]
        return "the prefill pool is full" if waits else "a prefill alone takes too long"
    return "the decode pool is full" if "tpot" in misses else "requests take too long"


def sentence(runs: Sequence[Mapping[str, Any]], slos: Mapping[str, float]) -> str:
    text = _objectives(runs, slos) if slos else _figures(runs[-1])
    cached = max(map(_cached_share, runs))
    if cached < CACHED_SHARE:
        return text
    return (
        f"{text}; up to {cached:.0%} of a run's prompt tokens were cached"
        if len(runs) > 1
        else (f"{text}; {cached:.0%} of the prompt tokens were cached")
    )


def _cached_share(run: Mapping[str, Any]) -> float:
    return float(run["total_cached_tokens"] / run["total_input_tokens"]) if run["total_input_tokens"] else 0.0


def _objectives(runs: Sequence[Mapping[str, Any]], slos: Mapping[str, float]) -> str:
    limits = " and ".join(f"{_NAMES[name]} p99 under {limit * 1e3:g} ms" for name, limit in slos.items())
    met_runs = [run for run in runs if not missed(run, slos)]
    missed_runs = [run for run in runs if missed(run, slos)]
    if not met_runs:
        slowest = min(missed_runs, key=_rate)
        return f"does not keep {limits} at {_load(slowest)}: {bottleneck(slowest, slos)}"
    best = max(met_runs, key=_rate)
    beyond = [run for run in missed_runs if _rate(run) > _rate(best)]
    if not beyond:
        return f"keeps {limits} at {_load(best)}"
    reason = bottleneck(min(beyond, key=_rate), slos)
    return f"keeps {limits} up to {_load(best)}; beyond that {reason}"


def _figures(run: Mapping[str, Any]) -> str:
    failures = bottleneck(run, {}) if run["failed"] else ""
    if not run["completed"]:
        return failures
    figures = (
        f"{run['request_throughput']:.3g} requests/s and {run['output_throughput']:.3g} output tokens/s, "
        f"TTFT p99 {run['p99_ttft_ms']:.4g} ms, TPOT p99 {run['p99_tpot_ms']:.3g} ms"
    )
    return f"{figures}; {failures}" if failures else figures


def _rate(run: Mapping[str, Any]) -> float:
    return float(run["request_rate"])


def _load(run: Mapping[str, Any]) -> str:
    if run.get("max_concurrency"):
        return f"{run['max_concurrency']} clients ({run['request_throughput']:.3g} requests/s)"
    if run.get("trace"):
        return f"the times of the trace ({run['request_throughput']:.3g} requests/s)"
    rate = _rate(run)
    if run.get("ramp_to"):
        return f"{rate:.3g} to {run['ramp_to']:.3g} requests/s"
    return "all requests at once" if rate == float("inf") else f"{rate:.3g} requests/s"
