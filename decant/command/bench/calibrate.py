from __future__ import annotations

import asyncio
from types import MappingProxyType
from typing import Annotated, Any

import typer

from decant.command.errors import CommandFailed, one_line_errors

HAND_ALL_OFF = MappingProxyType({"DECANT_HANDOFF_MIN_TOKENS": "0"})
"""Decode workers compute no prompts, as a plan assumes."""


def calibrate(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of the model, or a shape such as smollm2-135m; unset: the packaged tiny-python model."
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Length of the longest prompts.")] = 2000,
    output_tokens: Annotated[int, typer.Option(min=2, help="Mean length of the outputs.")] = 500,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache of each worker, such as 512M or 2G; unset: a share.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Deadline of a request in seconds.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
) -> None:
    """Measure the costs of workers on this machine, as JSON for `decant plan --calibrate`.

    Starts one prefill and one decode worker, and measures through a client: prefills by length, decode steps by batch
    size and context, latency and handoff, and how much longer both take while the other one computes.
    """
    from rich.console import Console

    from decant.bench.calibration import experiment
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.interference.report import PartProgress
    from decant.bench.reports.report import dump

    options = experiment.CalibrationOptions(prompt_tokens, output_tokens, timeout, seed)
    with one_line_errors():
        try:
            with PartProgress(Console(stderr=True)) as progress:
                document = measure(model, kv_memory, options, progress.notify)
        except InvalidBenchmark as error:
            raise CommandFailed(str(error), status=2) from None
        print(dump(document))


def measure(model: str | None, kv_memory: str | None, options: Any, notify: Any) -> dict[str, Any]:
    from decant.bench import model_shapes
    from decant.command.deployment.temporary_deployment import temporary_deployment

    served = ["--model", model_shapes.source(model)] if model else []
    memory = ["--kv-memory", kv_memory] if kv_memory else []
    workers = ("--prefill", "1", "--decode", "1")
    with temporary_deployment(*workers, *served, *memory, variables=HAND_ALL_OFF) as deployment:
        return asyncio.run(_measure(deployment.addresses, options, notify))


async def _measure(addresses: Any, options: Any, notify: Any) -> dict[str, Any]:
    from decant.bench.calibration import experiment
    from decant.client.async_client import AsyncClient

    async with AsyncClient(addresses) as client:
        return await experiment.measure(client, options, notify)
