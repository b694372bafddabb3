from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from decant.plan.inputs import Inputs
from decant.plan.quantities import Lengths, show_bytes, show_seconds
from decant.plan.sizing import Plan

if TYPE_CHECKING:
    from decant.plan.simulation.outcome import Outcome

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def document(inputs: Inputs, plan: Plan, outcome: Outcome | None = None) -> dict[str, Any]:
    workload, kv_capacity = inputs.workload, inputs.kv_capacity
    return {
        "model": inputs.shape.document(),
        "device": asdict(inputs.device),
        "dtype": inputs.dtype,
        "quantization": inputs.quantization,
        "kv_dtype": inputs.kv_dtype,
        "workload": {
            "prompt": _lengths(workload.prompt),
            "output": _lengths(workload.output),
            "rate": workload.rate,
            "quantile": workload.quantile,
        },
        "slo": asdict(inputs.slo),
        "memory": {
            "weights_bytes": kv_capacity.weights,
            "adapter_bytes": kv_capacity.adapters,
            "kv_bytes_per_token": kv_capacity.kv_token,
            "kv_bytes": kv_capacity.kv_bytes,
            "tokens": kv_capacity.tokens,
            "sequences": kv_capacity.sequences(workload.longest),
            "sequences_of": {str(length): kv_capacity.sequences(length) for length in inputs.lengths},
        },
        "tpot_seconds": {str(batch): seconds for batch, seconds in tpots(inputs)},
        "plan": asdict(plan),
        "profile": inputs.profile.document() if inputs.profile else None,
        "simulation": asdict(outcome) if outcome else None,
    }


def _lengths(lengths: Lengths) -> dict[str, float]:
    return {"low": lengths.low, "high": lengths.high, "mean": lengths.mean}


def tpots(inputs: Inputs) -> list[tuple[int, float]]:
    context = inputs.workload.context
    fit = inputs.kv_capacity.sequences(round(context))
    return [(batch, inputs.speed.step(batch, context)) for batch in BATCHES if batch <= fit]


def show(inputs: Inputs, plan: Plan, console: Console, outcome: Outcome | None = None) -> None:
    console.print(_facts("memory of a worker", _memory(inputs)))
    console.print(_batches(inputs))
    console.print(_facts(f"{inputs.workload.rate:g} requests/s", _service(inputs, plan)))
    if outcome is not None:
        title = f"simulated: {outcome.requests:,} requests in {show_seconds(outcome.seconds)}"
        console.print(_facts(title, _simulated(outcome)))
    how = "measured costs" if inputs.profile else "peak rates of the device and assumed efficiency"
    console.print(
        f"{_count(plan.prefill_workers, 'prefill worker')} and {_count(plan.decode_workers, 'decode worker')} serve "
        f"{inputs.workload.rate:g} requests/s and up to {plan.goodput:.3g} requests/s within the objectives; beyond "
        f"that the {plan.goodput_limit} pool is full. Times are from {how}."
    )


def _memory(inputs: Inputs) -> Sequence[tuple[str, str]]:
    kv_capacity, workload = inputs.kv_capacity, inputs.workload
    rows = [
        ("weights", f"{show_bytes(kv_capacity.weights)} of {show_bytes(kv_capacity.memory)}"),
        *([("adapters", show_bytes(kv_capacity.adapters))] if kv_capacity.adapters else []),
        ("KV cache of a token", show_bytes(kv_capacity.kv_token)),
        ("KV cache", f"{show_bytes(kv_capacity.kv_bytes)}: {kv_capacity.tokens:,} tokens"),
        (f"sequences of {workload.longest:,} tokens", f"{kv_capacity.sequences(workload.longest):,}"),
    ]
    return rows + [
        (f"sequences of {length:,} tokens", f"{kv_capacity.sequences(length):,}") for length in inputs.lengths
    ]


def _service(inputs: Inputs, plan: Plan) -> Sequence[tuple[str, str]]:
    decoding = f"{plan.decode_workers:,}, {plan.running:.1f} of at most {plan.batch_limit:,} sequences each"
    share = f"p{inputs.workload.quantile * 100:g}"
    return (
        (f"prefill of {inputs.workload.prompt} tokens", f"{show_seconds(plan.prefill_mean)} on average"),
        ("prefill workers", f"{plan.prefill_workers:,}, busy {plan.prefill_use:.0%} of the time"),
        ("TTFT p50", show_seconds(plan.ttft_median)),
        (f"TTFT {share}, longest prompt", show_seconds(plan.ttft)),
        ("decode workers", decoding),
        ("TPOT", show_seconds(plan.tpot)),
        ("KV cache in use", f"{plan.kv_use:.0%}"),
        ("from prefill to decode", f"{show_bytes(plan.pool_bytes)}/s"),
        ("goodput", f"{plan.goodput:.3g} requests/s"),
    )


def _simulated(outcome: Outcome) -> Sequence[tuple[str, str]]:
    balance = f"{outcome.prefill_balance:.2f} (prefill), {outcome.decode_balance:.2f} (decode)"
    return (
        ("wait for a prefill worker, p50 / p90 / p99", str(outcome.wait)),
        ("TTFT, p50 / p90 / p99", str(outcome.ttft)),
        ("TPOT, p50 / p90 / p99", str(outcome.tpot)),
        ("requests within the objectives", f"{outcome.within_objectives:.1%}"),
        ("prefill workers", f"busy {outcome.prefill_use:.0%} of the time"),
        ("busiest worker over the mean", balance),
        ("prompt tokens from the prefix cache", f"{outcome.cached_share:.0%}"),
        ("CPU time to place a request", show_seconds(outcome.placement_cpu)),
    )


def _batches(inputs: Inputs) -> Table:
    table = Table(title="decode steps", title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("sequences", "TPOT", "tokens/s of a worker"):
        table.add_column(name, justify="right")
    for batch, seconds in tpots(inputs):
        table.add_row(str(batch), show_seconds(seconds), f"{batch / seconds:,.0f}")
    return table


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
