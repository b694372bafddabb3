from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from decant.command import options as opt
from decant.command.errors import CommandFailed, one_line_errors

if TYPE_CHECKING:
    from decant.plan.inputs import Inputs
    from decant.plan.simulation.outcome import Outcome
    from decant.plan.sizing import Plan

Model = Annotated[
    str | None, Option(help="Folder with a config.json, such a file, a GGUF file, or a name on the Hugging Face hub.")
]
Shape = Annotated[
    str | None,
    Option(
        help="Shape of a model instead: layers=40,hidden=5120,heads=40; also kv_heads, head_dim, intermediate, "
        "vocab, params."
    ),
]
Device = Annotated[
    str | None,
    Option(help="Device of a worker: l4, l40s, a100-40gb, a100-80gb, h100, h200, mi300x or rtx-4090."),
]
Memory = Annotated[str | None, Option(help="Memory of the device, such as 24GiB.")]
Bandwidth = Annotated[str | None, Option(help="Memory bandwidth per second, such as 50GB.")]
Flops = Annotated[str | None, Option(help="bfloat16 operations per second, such as 312T.")]
MemoryShare = Annotated[float, Option(help="Share of the memory for weights and KV cache.")]
BandwidthEfficiency = Annotated[float, Option(help="Share of the peak bandwidth that a step reaches.")]
ComputeEfficiency = Annotated[float, Option(help="Share of the peak rate that a prefill reaches.")]
Dtype = Annotated[str, Option(help="Dtype: bfloat16, float16 or float32.")]
Quantization = Annotated[str | None, Option(help="Quantization of weights: int8, fp8 or int4; unset: the model's.")]
KvDtype = Annotated[str | None, Option(help="Dtype of the KV cache, also int8 or fp8; unset: that of --dtype.")]
AdapterMemory = Annotated[
    str | None, Option(help="Memory of a worker for LoRA adapters, its --adapter-memory, such as 2G; unset: none.")
]
PromptTokens = Annotated[str | None, Option(help="Prompt length, or range of lengths; unset: 1500-2000.")]
OutputTokens = Annotated[str | None, Option(help="Output length, or range of lengths; unset: 500.")]
Rate = Annotated[float | None, Option(help="Requests per second; unset: 1, or those of --trace.")]
Trace = Annotated[
    str | None,
    Option(
        help="File with arrivals and lengths instead, as CSV or JSON lines with arrival_s, prompt_tokens and "
        "output_tokens."
    ),
]
Quantile = Annotated[float, Option(help="Share of the requests that has to meet the TTFT objective.")]
SequenceLengths = Annotated[
    list[int] | None,
    Option("--sequence-length", min=1, help="Also count the sequences of this length; may be repeated."),
]
Calibrate = Annotated[
    str | None,
    Option(help="Measured costs instead of rates: a JSON file, or `measure` for this machine's CPU."),
]
Threads = Annotated[int, Option(min=1, help="Threads of `--calibrate measure`: those of one worker.")]
Simulate = Annotated[
    int | None,
    Option(min=1, help="Also simulate so many requests, placed by the router's code on the planned workers."),
]
Routers = Annotated[int | None, Option(min=1, help="Simulated routers; unset: 1.")]
Burstiness = Annotated[
    float | None, Option(help="Simulated arrivals: below 1 they come in bursts; unset: 1, which is Poisson.")
]
PrefixTokens = Annotated[
    int | None, Option(min=0, help="Simulated prompts begin with so many shared tokens; unset: 0.")
]
Prefixes = Annotated[int | None, Option(min=1, help="Different shared prefixes; unset: 1.")]


def plan(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    model: Model = None,
    shape: Shape = None,
    device: Device = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    flops: Flops = None,
    memory_share: MemoryShare = 0.9,
    adapter_memory: AdapterMemory = None,
    bandwidth_efficiency: BandwidthEfficiency = 0.8,
    compute_efficiency: ComputeEfficiency = 0.6,
    dtype: Dtype = "bfloat16",
    quantization: Quantization = None,
    kv_dtype: KvDtype = None,
    prompt_tokens: PromptTokens = None,
    output_tokens: OutputTokens = None,
    rate: Rate = None,
    trace: Trace = None,
    slo: opt.Slo = "",
    quantile: Quantile = 0.99,
    sequence_lengths: SequenceLengths = None,
    calibrate: Calibrate = None,
    threads: Threads = 1,
    simulate: Simulate = None,
    routers: Routers = None,
    burstiness: Burstiness = None,
    prefix_tokens: PrefixTokens = None,
    prefixes: Prefixes = None,
    as_json: opt.Json = False,
) -> None:
    """Compute which workers a workload needs, before anything runs.

    Shows the KV cache of a token, the tokens and sequences that fit, prefill time, TPOT over batch size, workers of
    each role, goodput, and bytes per second between the pools. What is impossible ends with 1, and with what would
    make it possible. `--simulate` shows what bursts, placement and shared prefixes do to the plan.
    """
    with one_line_errors():
        _plan(ctx.params)


def _plan(params: dict[str, Any]) -> None:
    from decant.command.status import new_console
    from decant.engine.errors import InvalidConfig, ModelRefused
    from decant.plan import inputs, report
    from decant.plan.errors import InvalidPlan
    from decant.plan.sizing import Sizing

    lengths = params["sequence_lengths"] or ()
    options = opt.from_params(inputs.PlanOptions, params, sequence_lengths=lengths)
    try:
        parsed = inputs.parse(options)
        plan = Sizing(parsed.speed, parsed.kv_capacity, parsed.workload, parsed.slo, parsed.overheads).plan()
        outcome = None if parsed.scenario is None else _simulated(parsed, plan)
    except (InvalidConfig, InvalidPlan, ModelRefused) as error:
        raise CommandFailed(str(error)) from None
    if params["as_json"]:
        print(json.dumps(report.document(parsed, plan, outcome), allow_nan=False))
    else:
        report.show(parsed, plan, new_console(), outcome)


def _simulated(inputs: Inputs, plan: Plan) -> Outcome:
    from decant.plan.simulation.outcome import outcome
    from decant.plan.simulation.simulation import Scenario, Simulation

    options: dict[str, Any] = dict(inputs.scenario or {})
    scenario = Scenario(plan.prefill_workers, plan.decode_workers, **options)
    simulation = Simulation(inputs.speed, inputs.kv_capacity, inputs.workload, scenario)
    simulation.run()
    return outcome(simulation, inputs.slo)
