from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from decant.client.channel import Tls
from decant.command import options as opt
from decant.command.bench.batching import batching
from decant.command.bench.calibrate import calibrate
from decant.command.bench.interference import interference
from decant.command.errors import CommandFailed, one_line_errors
from decant.command.files import check_report, write_report

bench = typer.Typer()
bench.command()(batching)
bench.command()(calibrate)
bench.command()(interference)

Up = Annotated[bool, Option("--up", help="Start a deployment on this machine, measure it and end it.")]
Model = Annotated[
    str | None,
    Option(help="Model id; with --up the folder to serve, or a shape (smollm2-135m); unset: the default."),
]
Prefill = Annotated[int, Option(min=0, help="Prefill workers of --up.")]
Decode = Annotated[int, Option(min=0, help="Decode workers of --up.")]
Workload = Annotated[str, Option(help="random, or anyscale: prompts of 512 tokens, outputs exp:128:1536.")]
Dataset = Annotated[Path | None, Option(help="Requests of a file: JSON lines, or conversations of ShareGPT (.json).")]
Trace = Annotated[bool, Option("--trace", help="Send at the arrival times of the dataset.")]
MultiTurn = Annotated[bool, Option("--multi-turn", help="Send all turns of each conversation, one after the other.")]
PromptTokens = Annotated[str, Option(help="Prompt lengths: a number, a range, or exp:MEAN:LONGEST.")]
OutputTokens = Annotated[str, Option(help="Output lengths, which are forced.")]
PrefixTokens = Annotated[int, Option(min=0, help="Tokens of a shared prefix before each prompt.")]
Prefixes = Annotated[int, Option(min=1, help="Number of shared prefixes.")]
Requests = Annotated[int, Option(min=1, help="Number of requests of a run; with --multi-turn of conversations.")]
Rate = Annotated[float | None, Option(help="Requests per second, at random times; unset: all at once.")]
RampTo = Annotated[float | None, Option(help="Rate at the end of the run, which changes linearly from --rate.")]
Burstiness = Annotated[float, Option(help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts.")]
Concurrency = Annotated[
    int | None, Option(min=1, help="Clients that each send one request after another, instead of --rate.")
]
Sweep = Annotated[bool, Option("--sweep", help="Search the highest rate that keeps --slo, from --rate on.")]
WarmUp = Annotated[int, Option(min=0, help="Requests before the measured ones.")]
Timeout = Annotated[float, Option(min=0.001, help="Deadline of a request in seconds.")]
Seed = Annotated[
    int | None,
    Option(help="Seed of prompts, lengths and arrivals; unset: a new one, so that no worker has the prompts cached."),
]
Html = Annotated[Path | None, Option(help="Also write a report with charts, as one HTML file.")]


@bench.callback(invoke_without_command=True)
def measure(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    address: opt.Address = None,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
    up: Up = False,
    model: Model = None,
    prefill: Prefill = 1,
    decode: Decode = 1,
    workload: Workload = "random",
    dataset: Dataset = None,
    trace: Trace = False,
    multi_turn: MultiTurn = False,
    prompt_tokens: PromptTokens = "128",
    output_tokens: OutputTokens = "64",
    prefix_tokens: PrefixTokens = 0,
    prefixes: Prefixes = 1,
    requests: Requests = 64,
    rate: Rate = None,
    ramp_to: RampTo = None,
    burstiness: Burstiness = 1.0,
    concurrency: Concurrency = None,
    sweep: Sweep = False,
    slo: opt.Slo = "",
    warm_up: WarmUp = 4,
    timeout: Timeout = 600.0,
    seed: Seed = None,
    html: Html = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a deployment: latency, throughput, and the rate that keeps objectives.

    Random prompts with forced output lengths, in an open loop (--rate), a closed loop (--concurrency) or all at once.
    JSON has the keys of `vllm bench serve`. Ends with 1 if every request failed.
    """
    with one_line_errors():
        set_options = {
            name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"
        }
        if ctx.invoked_subcommand is None:
            _refuse_unused(set_options, ctx.params)
            _measure(ctx.params)
        elif set_options:
            raise CommandFailed(
                f"{', '.join(map(_flag, sorted(set_options)))}: after {ctx.invoked_subcommand}", status=2
            )


_LEAST, _MOST = 1e-9, 1e9
_NEEDS = {"prefill": "up", "decode": "up", "burstiness": "rate", "prefixes": "prefix_tokens"}
_OF_RANDOM = ("prompt_tokens", "output_tokens", "prefix_tokens")


def _refuse_unused(set_options: set[str], params: dict[str, Any]) -> None:
    for name, needed in _NEEDS.items():
        if name in set_options and needed not in set_options:
            raise CommandFailed(f"{_flag(name)}: with {_flag(needed)}, got {params[name]}", status=2)
    for name in _OF_RANDOM:
        if name in set_options and params["dataset"] is not None:
            raise CommandFailed(f"{_flag(name)}: without --dataset, got {params[name]}", status=2)
        if name in set_options and name != "prefix_tokens" and params["workload"] == "anyscale":
            raise CommandFailed(f"{_flag(name)}: without --workload anyscale, got {params[name]}", status=2)


def _flag(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def _measure(params: dict[str, Any]) -> None:
    from rich.console import Console

    from decant.bench import benchmark
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.reports.report import LiveProgress

    check_report(params["html"])
    runs: list[dict[str, Any]] = []
    try:
        options = _options(params)
        benchmark.check(options)
        progress = LiveProgress(Console(stderr=True))
        with _target(params["address"], opt.tls_from(params), _up_arguments(params)) as target, progress:
            result = asyncio.run(benchmark.run(target, options, progress.notify, runs))
    except InvalidBenchmark as error:
        raise CommandFailed(str(error), status=2) from None
    except KeyboardInterrupt:
        if not runs:
            raise
        _report(benchmark.result_of(runs, options), options, params)
        raise CommandFailed(f"interrupted; finished runs in the report: {len(runs)}", status=130) from None
    _report(result, options, params)
    if not any(run["completed"] for run in result.runs):
        raise SystemExit(1)


def _report(result: Any, options: Any, params: dict[str, Any]) -> None:
    from decant.bench.reports import report
    from decant.bench.reports.html_report import to_html
    from decant.command.status import new_console

    if params["as_json"]:
        print(report.to_json(result))
    else:
        report.show(result, new_console())
    if params["html"] is not None:
        write_report(params["html"], to_html(result, options.slos))


def _up_arguments(params: dict[str, Any]) -> list[str] | None:
    if not params["up"]:
        return None
    from decant.bench import model_shapes

    model = ["--model", model_shapes.source(params["model"])] if params["model"] else []
    return ["--prefill", str(params["prefill"]), "--decode", str(params["decode"]), *model]


def _options(params: dict[str, Any]) -> Any:
    from decant.bench.benchmark import BenchOptions, fresh_seed, parse_slos
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.traffic.workload import SharedPrefix

    for name in ("rate", "ramp_to", "burstiness", "timeout"):
        if params[name] is not None and not _LEAST <= params[name] <= _MOST:
            raise InvalidBenchmark(_flag(name), f"{_LEAST:g} to {_MOST:g}", params[name])
    for name in ("address", "ca", "certificate", "key", "server_name"):
        if params["up"] and params[name]:
            raise InvalidBenchmark(f"--up, {_flag(name)}", "one of them", "both")
    return opt.from_params(
        BenchOptions,
        params,
        model="" if params["up"] else params["model"] or "",
        prefix=SharedPrefix(params["prefix_tokens"], params["prefixes"]),
        slos=parse_slos(params["slo"]),
        seed=fresh_seed() if params["seed"] is None else params["seed"],
    )


@contextlib.contextmanager
def _target(address: str | None, tls: Tls | None, up_arguments: list[str] | None) -> Iterator[Any]:
    from decant.bench.benchmark import Target
    from decant.command.deployment import deployments
    from decant.command.deployment.temporary_deployment import temporary_deployment

    token = os.environ.get("DECANT_TOKEN") or None
    if up_arguments is not None:
        print("decant: starting a deployment", file=sys.stderr, flush=True)
        with temporary_deployment(*up_arguments) as deployment:
            yield Target(deployment.addresses)
    elif address is not None:
        yield Target(address, tls, token)
    else:
        deployment = deployments.latest("--address")
        if not deployment.has_started:
            raise CommandFailed(f"`decant up` (process {deployment.pid}) is starting: measure it once it is ready")
        yield Target(deployment.addresses, tls, token)
