from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from decant.plan.capacity.devices import PRESETS, Device
from decant.plan.capacity.memory import KvCapacity
from decant.plan.capacity.model_shape import ModelShape, find_shape, parse_shape
from decant.plan.costs import cost_profile
from decant.plan.costs.cost_profile import Profile
from decant.plan.costs.overheads import NO_OVERHEADS, Overheads
from decant.plan.costs.speed import Efficiency, Measured, Speed, roofline
from decant.plan.errors import InvalidPlan
from decant.plan.quantities import Slo, parse_bytes, parse_count, parse_slo, parse_tokens
from decant.plan.recorded_workload import read as read_trace
from decant.plan.workload import Workload

FLOATS = ("bfloat16", "float16", "float32")
QUANTIZATIONS = ("int8", "fp8", "int4")
KV_DTYPES = (*FLOATS, "int8", "fp8")
DEFAULT_PROMPT_TOKENS = "1500-2000"
DEFAULT_OUTPUT_TOKENS = "500"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: str | None = None
    shape: str | None = None
    device: str | None = None
    memory: str | None = None
    bandwidth: str | None = None
    flops: str | None = None
    memory_share: float = 0.9
    adapter_memory: str | None = None
    bandwidth_efficiency: float = 0.8
    compute_efficiency: float = 0.6
    dtype: str = "bfloat16"
    quantization: str | None = None
    kv_dtype: str | None = None
    prompt_tokens: str | None = None
    output_tokens: str | None = None
    rate: float | None = None
    trace: str | None = None
    slo: str = ""
    quantile: float = 0.99
    sequence_lengths: Sequence[int] = ()
    calibrate: str | None = None
    threads: int = 1
    simulate: int | None = None
    routers: int | None = None
    burstiness: float | None = None
    prefix_tokens: int | None = None
    prefixes: int | None = None


@dataclass(frozen=True, slots=True)
class Inputs:
    shape: ModelShape
    device: Device
    dtype: str
    quantization: str | None
    kv_dtype: str
    kv_capacity: KvCapacity
    speed: Speed
    workload: Workload
    slo: Slo
    lengths: tuple[int, ...] = ()
    profile: Profile | None = None
    overheads: Overheads = NO_OVERHEADS
    scenario: Mapping[str, float] | None = None
    """None: no simulation."""


def parse(options: PlanOptions) -> Inputs:
    """Parse and check options. Raises InvalidPlan, for a model also ModelRefused, for a calibration InvalidConfig."""
    shape = _shape(options)
    kv_dtype = options.kv_dtype or options.dtype
    _one_of("--dtype", options.dtype, FLOATS)
    _one_of("--kv-dtype", kv_dtype, KV_DTYPES)
    quantization = options.quantization or shape.quantization
    if quantization is not None:
        _one_of("--quantization", quantization, QUANTIZATIONS)
    workload = _workload(options, shape)
    profile = _profile(options)
    device = _device(options, needs_rates=profile is None)
    weights = shape.weight_bytes(options.dtype, quantization)
    share = Efficiency(
        _share("--bandwidth-efficiency", options.bandwidth_efficiency),
        _share("--compute-efficiency", options.compute_efficiency),
    )
    dtypes = (options.dtype, quantization, kv_dtype)
    return Inputs(
        shape=shape,
        device=device,
        dtype=options.dtype,
        quantization=quantization,
        kv_dtype=kv_dtype,
        kv_capacity=KvCapacity(
            device.memory,
            weights,
            shape.kv_layout(kv_dtype),
            _share("--memory-share", options.memory_share),
            parse_bytes("--adapter-memory", options.adapter_memory) if options.adapter_memory is not None else 0,
        ),
        speed=Measured(profile.prefill, profile.decode) if profile else roofline(shape, device, dtypes, share),
        workload=workload,
        slo=parse_slo(options.slo),
        lengths=tuple(options.sequence_lengths),
        profile=profile,
        overheads=profile.overheads if profile else NO_OVERHEADS,
        scenario=_scenario(options),
    )


def _scenario(options: PlanOptions) -> dict[str, float] | None:
    names = ("routers", "burstiness", "prefix_tokens", "prefixes")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.simulate is None:
        for name, value in given.items():
            raise InvalidPlan(f"--{name.replace('_', '-')}", "with --simulate", value)
        return None
    if options.trace is not None and options.burstiness is not None:
        raise InvalidPlan("--burstiness", "without --trace, which has the arrivals", options.burstiness)
    if "prefixes" in given and not options.prefix_tokens:
        raise InvalidPlan("--prefixes", "with --prefix-tokens", options.prefixes)
    return {"requests": options.simulate, **given}


def _shape(options: PlanOptions) -> ModelShape:
    if (options.model is None) == (options.shape is None):
        raise InvalidPlan("--model, --shape", "one of them", "both" if options.model else "neither")
    return find_shape(options.model) if options.model else parse_shape(options.shape or "")


def _workload(options: PlanOptions, shape: ModelShape) -> Workload:
    if not 0 < options.quantile < 1:
        raise InvalidPlan("--quantile", "above 0 and below 1", options.quantile)
    if options.rate is not None and not 0 < options.rate < float("inf"):
        raise InvalidPlan("--rate", "requests per second above 0", options.rate)
    workload = _recorded(options, options.trace) if options.trace is not None else _assumed(options)
    if shape.context is not None and workload.longest > shape.context:
        limit = f"at most {shape.context:,} tokens with the output (the model's context length)"
        raise InvalidPlan("--trace" if workload.trace else "--prompt-tokens", limit, f"{workload.longest:,}")
    return workload


def _assumed(options: PlanOptions) -> Workload:
    return Workload(
        parse_tokens("--prompt-tokens", options.prompt_tokens or DEFAULT_PROMPT_TOKENS),
        parse_tokens("--output-tokens", options.output_tokens or DEFAULT_OUTPUT_TOKENS),
        1.0 if options.rate is None else options.rate,
        options.quantile,
    )


def _recorded(options: PlanOptions, path: str) -> Workload:
    if options.prompt_tokens is not None or options.output_tokens is not None:
        raise InvalidPlan("--trace", "without --prompt-tokens and --output-tokens: a trace has the lengths", "both")
    trace = read_trace(Path(path))
    rate = trace.rate if options.rate is None else options.rate
    return Workload(trace.prompt, trace.output, rate, options.quantile, trace)


_RATES = ("bandwidth", "flops", "bandwidth_efficiency", "compute_efficiency")


def _profile(options: PlanOptions) -> Profile | None:
    if options.threads != 1 and options.calibrate != "measure":
        raise InvalidPlan("--threads", "with --calibrate measure", options.threads)
    if options.calibrate is None:
        return None
    for name in _RATES:
        if getattr(options, name) != getattr(PlanOptions(), name):
            raise InvalidPlan(f"--{name.replace('_', '-')}", "without --calibrate", getattr(options, name))
    if options.quantization is not None:
        raise InvalidPlan("--calibrate", "no --quantization: costs are of the weights that were measured", "both")
    if options.calibrate != "measure":
        return cost_profile.read(Path(options.calibrate))
    if options.model is None or not Path(options.model).is_dir():
        raise InvalidPlan("--calibrate measure", "--model with a folder that has weights", options.model or "none")
    return cost_profile.measure(options.model, options.dtype, options.threads)


def _device(options: PlanOptions, *, needs_rates: bool) -> Device:
    device = Device("given", 0, 0.0, 0.0)
    if options.device is not None:
        _one_of("--device", options.device, tuple(PRESETS))
        device = PRESETS[options.device]
    if options.memory is not None:
        device = replace(device, memory=parse_bytes("--memory", options.memory))
    if options.bandwidth is not None:
        device = replace(device, bandwidth=float(parse_bytes("--bandwidth", options.bandwidth)))
    if options.flops is not None:
        device = replace(device, flops=float(parse_count("--flops", options.flops)))
    if not device.memory:
        raise InvalidPlan("--device, --memory", f"one of them; devices: {', '.join(PRESETS)}", "neither")
    if needs_rates and not (device.bandwidth and device.flops):
        raise InvalidPlan("--memory", "with --bandwidth and --flops, or with --calibrate", "without")
    return device


def _one_of(field: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InvalidPlan(field, f"one of {', '.join(known)}", value)


def _share(field: str, value: float) -> float:
    if not 0 < value <= 1:
        raise InvalidPlan(field, "above 0, at most 1", value)
    return value
