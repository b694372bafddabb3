"""`decant plan`: its options; `decant.plan` has the arithmetic."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decant.command.errors import CommandFailed, one_line_errors

if TYPE_CHECKING:
    from decant.plan.inputs import Inputs
    from decant.plan.outcome import Outcome
    from decant.plan.sizing import Plan


def plan(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option(help="Folder with a config.json, or such a file.")] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of a model instead: layers=40,hidden=5120,heads=40; also kv_heads, head_dim, intermediate, "
            "vocab, params."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device of a worker: l4, l40s, a100-40gb, a100-80gb, h100, h200, mi300x or rtx-4090."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of the device, such as 24GiB.")] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Memory bandwidth per second, such as 50GB.")] = None,
    flops: Annotated[str | None, typer.Option(help="bfloat16 operations per second, such as 312T.")] = None,
    memory_share: Annotated[float, typer.Option(help="Share of the memory for weights and KV cache.")] = 0.9,
    bandwidth_efficiency: Annotated[float, typer.Option(help="Share of the peak bandwidth that a step reaches.")] = 0.8,
    compute_efficiency: Annotated[float, typer.Option(help="Share of the peak rate that a prefill reaches.")] = 0.6,
    dtype: Annotated[str, typer.Option(help="Dtype: bfloat16, float16 or float32.")] = "bfloat16",
    quantization: Annotated[
        str | None, typer.Option(help="Quantization of the weights: int8, fp8 or int4; unset: none.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Dtype of the KV cache, also int8 or fp8; unset: that of --dtype.")
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option(help="Prompt length, or range of lengths; unset: 1500-2000.")
    ] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Output length, or range of lengths; unset: 500.")] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second; unset: 1, or those of --trace.")] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="File with arrivals and lengths instead, as CSV or JSON lines with arrival_s, prompt_tokens and "
            "output_tokens.",
        ),
    ] = None,
    slo: Annotated[str, typer.Option(help="Objectives, such as ttft=500ms,tpot=50ms.", show_default=False)] = "",
    quantile: Annotated[float, typer.Option(help="Share of the requests that has to meet the TTFT objective.")] = 0.99,
    sequence_lengths: Annotated[
        list[int] | None,
        typer.Option("--sequence-length", min=1, help="Also count the sequences of this length; may be repeated."),
    ] = None,
    calibrate: Annotated[
        str | None,
        typer.Option(help="Measured costs instead of rates: a JSON file, or `measure` for this machine's CPU."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of `--calibrate measure`: those of one worker.")] = 1,
    simulate: Annotated[
        int | None,
        typer.Option(min=1, help="Also simulate so many requests, placed by the router's code on the planned workers."),
    ] = None,
    routers: Annotated[int | None, typer.Option(min=1, help="Simulated routers; unset: 1.")] = None,
    burstiness: Annotated[
        float | None, typer.Option(help="Simulated arrivals: below 1 they come in bursts; unset: 1, which is Poisson.")
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Simulated prompts begin with so many shared tokens; unset: 0."),
    ] = None,
    prefixes: Annotated[int | None, typer.Option(min=1, help="Different shared prefixes; unset: 1.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Compute which workers a workload needs, before anything runs.

    Shows the KV cache of a token, the tokens and sequences that fit, prefill time, TPOT over batch size, workers of
    each role, goodput, and bytes per second between the pools. What is impossible ends with 1, and with what would
    make it possible. `--simulate` shows what bursts, placement and shared prefixes do to the plan.
    """
    from decant.command.status import new_console
    from decant.engine.errors import ModelRefused
    from decant.plan import inputs, report
    from decant.plan.errors import InvalidPlan
    from decant.plan.sizing import Sizing

    with one_line_errors():
        given = {field.name: ctx.params[field.name] for field in fields(inputs.PlanOptions)}
        options = inputs.PlanOptions(**{**given, "sequence_lengths": sequence_lengths or ()})
        try:
            parsed = inputs.parse(options)
            made = Sizing(parsed.speed, parsed.room, parsed.workload, parsed.slo).plan()
            outcome = None if parsed.scenario is None else _simulated(parsed, made)
        except (InvalidPlan, ModelRefused) as error:
            raise CommandFailed(str(error)) from None
        if as_json:
            print(json.dumps(report.document(parsed, made, outcome)))
        else:
            report.show(parsed, made, new_console(), outcome)


def _simulated(inputs: Inputs, made: Plan) -> Outcome:
    from decant.plan.outcome import outcome
    from decant.plan.simulation import Scenario, Simulation

    options: dict[str, Any] = dict(inputs.scenario or {})
    scenario = Scenario(made.prefill_workers, made.decode_workers, **options)
    simulation = Simulation(inputs.speed, inputs.room, inputs.workload, scenario)
    simulation.run()
    return outcome(simulation, inputs.slo)
