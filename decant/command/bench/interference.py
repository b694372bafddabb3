from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from decant.command.errors import CommandFailed, one_line_errors
from decant.command.files import check_report, write_report


def interference(  # noqa: PLR0913 - a command's options are its parameters
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub name of the model, or a shape with random weights, such as qwen2.5-0.5b; unset: the "
            "packaged tiny-python model."
        ),
    ] = None,
    running: Annotated[int, typer.Option(min=1, max=64, help="Answers that are running.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=128, help="Length of the prompt that arrives beside them.")] = 1500,
    chunks: Annotated[
        str, typer.Option(help="Tokens per step of mixed workers, separated by commas.")
    ] = "64,128,256,512,1024,2048",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers of the split.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers of the split.")] = 1,
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache of each worker, such as 512M or 2G; unset: a share.")
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Trials of each deployment.")] = 3,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a trial may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Seed of the prompts.")] = 0,
    html: Annotated[Path | None, typer.Option(help="Also write a report with charts, as one HTML file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Measure what a long prompt does to running answers: split workers beside mixed ones on the same cores.

    Starts a deployment for each configuration and ends it: one mixed worker that computes the prompt in one step, in
    chunks of each size, and in chunks by predicted time; then prefill and decode workers. Measures the gaps between
    tokens of the running answers, their tokens/s, and the time to first token of the prompt.
    """
    from rich.console import Console

    from decant.bench.errors import InvalidBenchmark
    from decant.bench.interference import configurations, experiment, report

    with one_line_errors():
        check_report(html)
        try:
            options = configurations.InterferenceOptions(
                running=running,
                prompt_tokens=prompt_tokens,
                chunks=configurations.parse_chunks(chunks),
                prefill=prefill,
                decode=decode,
                trials=trials,
                timeout=timeout,
                seed=seed,
            )
            name, start = _starter(model, kv_memory)
            with report.PartProgress(Console(stderr=True)) as progress:
                document = experiment.measure(name, options, start, progress.notify)
        except InvalidBenchmark as error:
            raise CommandFailed(str(error), status=2) from None
        except TimeoutError:
            raise CommandFailed(f"--timeout: a trial took more than {timeout:g} s") from None
        _show(document, html, as_json=as_json)


def _show(document: Any, html: Path | None, *, as_json: bool) -> None:
    from decant.bench.interference import report
    from decant.bench.interference.html_report import to_html
    from decant.bench.reports.report import dump
    from decant.command.status import new_console

    if as_json:
        print(dump(document))
    else:
        report.show(document, new_console())
    if html is not None:
        write_report(html, to_html(document))


def _starter(model: str | None, kv_memory: str | None) -> tuple[str, Any]:
    """Return the model's name and an `experiment.Start`."""
    from decant import models
    from decant.bench import model_shapes
    from decant.command.deployment.temporary_deployment import temporary_deployment

    name = Path(model).resolve().name if model else models.DEFAULT_MODEL
    if model is not None and model in model_shapes.SHAPES and not Path(model).is_dir():
        name, model = model, str(model_shapes.make(model))
    shared = [*(["--model", model] if model else []), *(["--kv-memory", kv_memory] if kv_memory else [])]

    @contextlib.contextmanager
    def start(configuration: Any) -> Iterator[Sequence[str]]:
        workers = ["--prefill", str(configuration.prefill), "--decode", str(configuration.decode)]
        with temporary_deployment(*workers, *shared, variables=configuration.variables) as deployment:
            yield deployment.addresses

    return name, start
