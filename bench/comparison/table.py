"""The table of limits: each measured figure, the machine's limit, their ratio, and the target.

decode, 1 sequence   measured ms    bytes of the weights / read bandwidth, taken between the steps
decode, 8                           the packed products alone, in order
decode, 64                          operations / product rate
a prompt             s              the same, over its steps
workloads            tok/s          the same, over the engine's steps
mixed                s              the same, over the steps after the prompt's arrival
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bench.comparison.roofline import Rates, Step, Weights

RATE_OF_GOALS = 1e12
"""Operations per second of the machine that the goals in seconds are for; they scale with the measured rate."""


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    unit: str
    measured: float | None
    limit: float | None = None
    share_goal: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def share(self) -> float | None:
        if not self.measured or not self.limit:
            return None
        return self.measured / self.limit if self.unit == "tok/s" else self.limit / self.measured

    @property
    def met(self) -> bool | None:
        if self.share_goal is not None:
            return None if self.share is None else self.share >= self.share_goal
        if self.most is not None:
            return None if self.measured is None else self.measured <= self.most
        return None

    def as_json(self) -> dict[str, Any]:
        names = ("name", "unit", "measured", "limit", "share", "share_goal", "most", "note", "met")
        return {name: getattr(self, name) for name in names}


def allowed(rates: Rates, figures: Mapping[str, Any], last_sent: float) -> dict[str, float] | None:
    if figures["weights"] is None:
        return None
    weights, steps = Weights(**figures["weights"]), [Step(*step) for step in figures["schedule"]]
    least = {"output_throughput": figures["total_output_tokens"] / rates.all_seconds(weights, steps)}
    if "last_ttft_ms" not in figures:
        return least
    after = [step for step in steps if step.ended > last_sent]
    first = last_sent + figures["last_ttft_ms"] / 1e3
    return least | {
        "last_ttft_ms": 1e3 * rates.all_seconds(weights, (step for step in after if step.ended <= first)),
        "longest_step_ms": 1e3 * max(rates.seconds(weights, step.tokens, step.rows) for step in after),
    }


def rates_of(measured: Mapping[str, Any]) -> Rates:
    limits = measured["limits"]
    return Rates(limits["read_bandwidth_gb_s"] * 1e9, limits["product_rate_gflop_s"] * 1e9)


def limits_of(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    runs = (run for workload in workloads_of(result).values() for run in workload["contenders"]["decant"]["runs"])
    return [run["limits"] for run in runs if "limits" in run]


def workloads_of(result: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] | None = result.get("workloads")
    return {result["workload"]: result} if found is None else found


def lines(result: Mapping[str, Any]) -> list[Line]:
    weights = Weights(**result["steps"]["weights"])
    return [
        *_steps(weights, result["steps"]),
        *_workloads(result["workloads"]),
        *_mixed(result["workloads"]["mixed"]),
        *_memory(weights, result),
    ]


def _steps(weights: Weights, steps: Mapping[str, Any]) -> Iterator[Line]:
    cases, prompt, rates = steps["cases"], steps["prompt"], rates_of(steps)
    meanwhile = cases["decode 1"]["read_bandwidth_gb_s"] * 1e9
    limits = {
        "decode 1": (1e3 * weights.bytes_read(1) / meanwhile, 0.90, "weight bytes / bandwidth between its steps"),
        "decode 8": (1e3 * cases["decode 8"]["products_seconds"], 20 / 27, "packed products alone"),
        "decode 64": (1e3 * rates.seconds(weights, 64, 64), 0.60, "operations / product rate"),
    }
    for name, (limit, goal, note) in limits.items():
        case = cases[name]
        title = f"{name.replace(' ', ', ')} at {case['context']} tokens"
        yield Line(title, "ms", 1e3 * case["seconds"], limit, goal, note=note)
    least = rates.all_seconds(weights, (Step(*step) for step in prompt["schedule"]))
    title = f"prompt of {prompt['tokens']:,} tokens"
    yield Line(f"{title}, linear layers", "s", prompt["profile"]["linears"], least, 0.65, note="time within them alone")
    yield Line(f"{title}, whole", "s", prompt["seconds"], least, 0.65, note="attention counts as none in the limit")


def _workloads(workloads: Mapping[str, Any]) -> Iterator[Line]:
    for name, goal in (("exponential", 0.85), ("long-prompts", 0.77)):
        ours = workloads[name]["contenders"]["decant"]
        yield Line(name, "tok/s", ours["output_throughput"], _get(workloads[name], "output_throughput"), goal)


def _mixed(mixed: Mapping[str, Any]) -> Iterator[Line]:
    ours = mixed["contenders"]["decant"]
    scale = RATE_OF_GOALS / rates_of(ours).products
    for name, key, limit, goal in (
        ("longest gap", "max_itl_after_last_ms", "longest_step_ms", 0.3),
        ("the prompt's TTFT", "last_ttft_ms", "last_ttft_ms", 4.0),
    ):
        measured, least = ours[key], _get(mixed, limit)
        note = f"{goal:g} s at {RATE_OF_GOALS / 1e9:,.0f} GFLOP/s"
        yield Line(f"mixed, {name}", "s", _milli(measured), _milli(least), most=goal * scale, note=note)


def _memory(weights: Weights, result: Mapping[str, Any]) -> Iterator[Line]:
    waste = result["waste"]
    note = f"blocks of {waste['block_size']}, {waste['context']:.0f} tokens of context on average"
    yield Line("KV memory lost to partly filled blocks", "%", 100 * waste["lost"], most=4.0, note=note)
    held = result["steps"]["held_bytes"]
    yield Line(
        "weights in memory", "GB", held / 1e9, weights.held / 1e9, 0.90, note="once, and the table of a tied head"
    )
    peak = max(workload["contenders"]["decant"]["peak_rss_gb"] for workload in result["workloads"].values())
    yield Line("peak memory", "GB", peak, note=f"with {result['kv_bytes'] / 1e9:.2f} GB for blocks")


def _get(workload: Mapping[str, Any], key: str) -> float | None:
    limit: float | None = (workload["allowed"] or {}).get(key)
    return limit


def _milli(value: float | None) -> float | None:
    return None if value is None else value / 1e3
