from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from decant.command.errors import CommandFailed, one_line_errors
from decant.command.files import check_report, write_report


def batching(  # noqa: PLR0913 - a command's options are its parameters
    model: Annotated[
        str | None,
        typer.Option(help="Folder of a model, or a shape such as qwen2.5-0.5b; unset: the packaged tiny-python model."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of weights and KV cache: auto, bfloat16 or float32.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of the engine; unset: its cores.")] = None,
    kv_memory: Annotated[str, typer.Option(help="Memory for KV caches, such as 256M or 2G.")] = "256M",
    caps: Annotated[
        str, typer.Option(help="Longest answers of the exponential queues, separated by commas.")
    ] = "32,128,512,1536",
    requests: Annotated[int, typer.Option(min=32, help="Requests of each exponential queue.")] = 128,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of the exponential queues.")] = 512,
    kv_tokens: Annotated[
        int, typer.Option(min=1, help="KV memory of each contender in the exponential queues, in tokens.")
    ] = 8704,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a step that mixes prompts and decodes.")] = 256,
    seed: Annotated[int, typer.Option(help="Seed of prompts and lengths.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a report with charts, as one HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Measure static against continuous batching, on the engine in this process.

    Batch sizes of 1 to 128; a queue of 32 with every eighth answer long, and one with equal answers; exponential
    lengths as published, where the longest answer is one of --caps. Static batches, padded to their own longest answer
    and to the longest of all, and continuous batching have the same KV memory. About a minute with the small model.
    """
    from rich.console import Console

    from decant.bench.batching import experiment, report
    from decant.bench.batching.html_report import to_html
    from decant.bench.errors import InvalidBenchmark
    from decant.bench.reports.report import dump
    from decant.command.status import new_console
    from decant.runtime.cores import available_cores

    with one_line_errors():
        check_report(html)
        try:
            options = experiment.BatchingOptions(
                caps=experiment.parse_caps(caps),
                prompt_tokens=prompt_tokens,
                kv_tokens=kv_tokens,
                requests=requests,
                token_budget=token_budget,
                threads=threads or available_cores(),
                seed=seed,
            )
            folder, device = _load(model, dtype, kv_memory, options.threads)
            with report.TokenProgress(Console(stderr=True)) as progress:
                document = experiment.measure(folder, device, options, progress.notify)
        except InvalidBenchmark as error:
            raise CommandFailed(str(error), status=2) from None
        if as_json:
            print(dump(document))
        else:
            report.show(document, new_console())
        if html is not None:
            write_report(html, to_html(document))


def _load(model: str | None, dtype: str, kv_memory: str, threads: int) -> tuple[str, Any]:
    from decant import models
    from decant.bench import model_shapes
    from decant.bench.batching.model import load_device
    from decant.bench.errors import InvalidBenchmark
    from decant.command.up.resources import parse_size
    from decant.engine.errors import InvalidConfig, ModelRefused

    try:
        folder = str(models.path() if model is None else model_shapes.checkpoint(model))
        return folder, load_device(folder, dtype, parse_size(kv_memory), threads)
    except (FileNotFoundError, InvalidBenchmark, InvalidConfig, ModelRefused) as error:
        raise CommandFailed(str(error), status=2) from None
