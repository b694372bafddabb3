"""`decant bench`: its options; `decant.bench` measures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from decant.command.errors import CommandFailed, one_line_errors


def bench(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    address: Annotated[
        str | None, typer.Option(help="host:port of routers, separated by commas; unset: those on this machine.")
    ] = None,
    up: Annotated[
        bool, typer.Option("--up", help="Start a deployment on this machine, measure it and end it.")
    ] = False,
    model: Annotated[
        str | None, typer.Option(help="Model id; with --up the folder to serve; unset: the default.")
    ] = None,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers of --up.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers of --up.")] = 1,
    workload: Annotated[
        str, typer.Option(help="random, or anyscale: prompts of 512 tokens, outputs exp:128:1536.")
    ] = "random",
    dataset: Annotated[
        Path | None, typer.Option(help="Requests of a file: JSON lines, or conversations of ShareGPT (.json).")
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Send at the arrival times of the dataset.")] = False,
    prompt_tokens: Annotated[str, typer.Option(help="Prompt lengths: a number, a range, or exp:MEAN:LONGEST.")] = "128",
    output_tokens: Annotated[str, typer.Option(help="Output lengths, which are forced.")] = "64",
    prefix_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a shared prefix before each prompt.")] = 0,
    prefixes: Annotated[int, typer.Option(min=1, help="Number of shared prefixes.")] = 1,
    requests: Annotated[int, typer.Option(min=1, help="Number of requests of a run.")] = 64,
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, at random times; unset: all at once.")
    ] = None,
    burstiness: Annotated[
        float, typer.Option(help="Shape of the gamma-distributed gaps: 1 is Poisson, less comes in bursts.")
    ] = 1.0,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Clients that each send one request after another, instead of --rate.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Search the highest rate that keeps --slo, from --rate on.")
    ] = False,
    slo: Annotated[str, typer.Option(help="Objectives, such as ttft=500ms,tpot=50ms.", show_default=False)] = "",
    warm_up: Annotated[int, typer.Option(min=0, help="Requests before the measured ones.")] = 4,
    timeout: Annotated[float, typer.Option(min=0.001, help="Deadline of a request in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts, lengths and arrivals.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a report with charts, as one HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Measure a deployment: latency, throughput, and the rate that keeps objectives.

    Random prompts with forced output lengths, in an open loop (--rate), a closed loop (--concurrency) or all at once.
    JSON has the keys of `vllm bench serve`. Ends with 1 if every request failed.
    """
    from rich.console import Console

    from decant.bench import benchmark, report
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.html_report import to_html
    from decant.command.status import new_console

    with one_line_errors():
        try:
            options = _options(ctx.params)
            benchmark.check(options)
            started = ["--prefill", str(prefill), "--decode", str(decode), *(["--model", model] if model else [])]
            progress = report.LiveProgress(Console(stderr=True))
            with _target(address, started if up else None) as target, progress:
                result = asyncio.run(benchmark.run(target, options, progress.notify))
        except InvalidBenchmark as error:
            raise CommandFailed(str(error), status=2) from None
        if html is not None:
            _write(html, to_html(result, options.slos))
        if as_json:
            print(report.to_json(result))
        else:
            report.show(result, new_console())
        if not any(run["completed"] for run in result.runs):
            raise SystemExit(1)


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"--html: {file}: {error.strerror}") from None


def _options(given: dict[str, Any]) -> Any:
    from decant.bench.benchmark import BenchOptions, parse_slos
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.workload import SharedPrefix

    for name in ("rate", "burstiness"):
        if given[name] is not None and not 0 < given[name] < float("inf"):
            raise InvalidBenchmark(f"--{name}", "above 0", given[name])
    if given["up"] and given["address"]:
        raise InvalidBenchmark("--up, --address", "one of them", "both")
    same = [field.name for field in fields(BenchOptions) if field.name not in ("model", "prefix", "slos")]
    return BenchOptions(
        **{name: given[name] for name in same},
        model="" if given["up"] else given["model"] or "",
        prefix=SharedPrefix(given["prefix_tokens"], given["prefixes"]),
        slos=parse_slos(given["slo"]),
    )


@contextlib.contextmanager
def _target(address: str | None, started: list[str] | None) -> Iterator[Any]:
    """The deployment at `address`, a new one with the arguments `started`, or the newest on this machine."""
    from decant.bench.benchmark import Target
    from decant.command import deployments
    from decant.command.temporary_deployment import temporary_deployment

    token = os.environ.get("DECANT_TOKEN") or None
    if started is not None:
        print("decant: starting a deployment", file=sys.stderr, flush=True)
        with temporary_deployment(*started) as deployment:
            yield Target(deployment.addresses)
    elif address is not None:
        yield Target(address, token=token)
    else:
        yield Target(deployments.latest("--address").addresses, token=token)
