"""Commands and their options. A command's modules are imported when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from decant.client.channel import Tls
from decant.client.options import Options, Prompt
from decant.command import deployments
from decant.command.bench import bench
from decant.command.deployments import Deployment
from decant.command.errors import CommandFailed, one_line_errors
from decant.command.plan import plan
from decant.command.waiting import Waiting

app = typer.Typer(
    name="decant",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(is_set: bool) -> None:
    if is_set:
        print(f"decant {version('decant-llm')}")
        raise typer.Exit


@app.callback()
def decant(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve large language models, prefill and decode on separate workers."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="Redis of the deployment; unset: of the one on this machine.", show_default=False)
]
Ca = Annotated[Path | None, typer.Option(help="PEM roots of the server's certificate; turns TLS on.")]
Certificate = Annotated[Path | None, typer.Option(help="PEM file with this client's certificate chain; needs --key.")]
Key = Annotated[Path | None, typer.Option(help="PEM file with the key of --certificate.")]
ServerName = Annotated[str | None, typer.Option(help="Name in the server's certificate, if it is not its address.")]


@app.command()
def generate(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text; '-' or none: standard input.")] = None,
    address: Annotated[
        str | None, typer.Option(help="host:port of routers, separated by commas; unset: those on this machine.")
    ] = None,
    chat: Annotated[
        bool, typer.Option(help="Send PROMPT as a user's message, with the model's chat template.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="Model id or alias; unset: the server's default.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum output tokens; unset: what the context length leaves.")
    ] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Minimum output tokens before it may stop.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 takes the most likely token.")
    ] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability to draw from.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Number of most likely tokens to draw from; 0: all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Minimum share of the most likely token's probability.")] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Penalty times a token's count in the output.")
    ] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Penalty for a token that is in the output.")] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Penalty that counts prompt and output; 1 is off.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the draws: the same one gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the output; may be repeated.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="Token that ends the output; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool | None, typer.Option(help="Continue past the model's end of sequence.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="Logprobs with this many alternatives per token, in --json.")
    ] = None,
    token_ids: Annotated[bool | None, typer.Option(help="Token ids, in --json.")] = None,
    priority: Annotated[int | None, typer.Option(help="Priority, -1000 to 1000; larger is more urgent.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Id of the request; unset: generated.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds until the deadline of the request.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for a deployment on this machine; unset: 60 while it starts."),
    ] = None,
    as_json: Json = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
) -> None:
    """Send a prompt to a deployment and print the output as it is generated.

    The output goes to standard output, its times and workers to standard error.
    """
    from decant.command import generate as generating

    with one_line_errors():
        text = _prompt(prompt)
        content: Prompt = [{"role": "user", "content": text}] if chat else text
        options = {name: value for name, value in ctx.params.items() if name in Options.__annotations__}
        chosen = cast(Options, {k: v for k, v in options.items() if v not in (None, [], ())})
        args = generating.GenerateArgs(address or "", _tls(ca, certificate, key, server_name), timeout, as_json)
        if address is None:
            line = generating.run_here(args, content, chosen, Waiting("--address", wait))
        else:
            line = generating.run(args, content, chosen)
        if not as_json:
            print(line, file=sys.stderr)


@app.command()
def status(
    redis_url: RedisUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second, until Ctrl-C.")] = False,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until a deployment on this machine has started.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """Show routers and workers: state, model and load.

    States: starting, loading 40 %, warming up (these only of a deployment on this machine), ready, draining,
    lost 3 s ago.
    """
    from decant.command import status as showing

    with one_line_errors():
        if redis_url is not None:
            deployment = deployments.with_redis(redis_url)
        elif wait:
            deployment = Waiting("--redis-url", wait).deployment()
        else:
            deployment = deployments.latest("--redis-url")
        url = redis_url or cast(Deployment, deployment).redis_url
        showing.run(url, as_json=as_json, deployment=deployment, watch=watch)


@app.command()
def audit(  # noqa: PLR0913 - a command's options are its parameters
    redis_url: RedisUrl = None,
    wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait until a deployment on this machine has started.")
    ] = 0.0,
    as_json: Json = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
) -> None:
    """Check that every KV block of every worker has an owner.

    Ends with 1 if the blocks of a worker do not add up, with 2 if there is no worker. Workers of a deployment on this
    machine are called with its certificates, others with --ca, --certificate and --key.
    """
    from decant.command import audit as auditing

    with one_line_errors():
        tls = _tls(ca, certificate, key, server_name)
        if redis_url is None:
            deployment = Waiting("--redis-url", wait).deployment()
            redis_url, tls = deployment.redis_url, tls or deployment.peer_tls
        elif tls is None and (known := deployments.with_redis(redis_url)) is not None:
            tls = known.peer_tls
        if not auditing.run(redis_url, tls, as_json=as_json):
            raise SystemExit(1)


@app.command()
def up(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    model: Annotated[
        str | None, typer.Option(help="Folder or hub name of the model; unset: the small one of this package.")
    ] = None,
    router: Annotated[int, typer.Option(min=1, help="Number of routers.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Number of decode workers.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the first router, others get the next ones; 0: free ports.")
    ] = 50051,
    host: Annotated[
        str, typer.Option(help="Address on which routers listen; 0.0.0.0 or :: is every address.")
    ] = "127.0.0.1",
    redis_url: Annotated[str | None, typer.Option(help="Redis to use; unset: a private one.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of weights and KV cache: auto, bfloat16, float16 or float32.")
    ] = "auto",
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for the KV cache of each worker, such as 512M or 2G; unset: a share.")
    ] = None,
    ready_seconds: Annotated[float, typer.Option(min=1, help="Seconds to wait until all processes are ready.")] = 600.0,
    log_format: Annotated[
        str, typer.Option(help="auto, json or console; auto: columns on a terminal, JSON elsewhere.")
    ] = "auto",
) -> None:
    """Run a deployment on this machine: Redis, workers and routers, each in its own process.

    Workers share the cores and the memory. Each process gets the variables DECANT_* of its settings. Ctrl-C drains the
    deployment, a second one ends it at once; no process or file is left.
    """
    from decant.command import up as starting

    with one_line_errors():
        raise SystemExit(starting.run(starting.UpOptions(**ctx.params)))


@app.command()
def demo() -> None:
    """Start a deployment with the small model, send one prompt, show what each worker did, and end it."""
    from decant.command import demo as showing

    with one_line_errors():
        showing.run()


app.command()(plan)
app.command()(bench)


_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def router(ctx: typer.Context) -> None:
    """Run one router in this process. `decant router --help` shows its settings."""
    from decant.router.main import main

    raise SystemExit(main(ctx.args))


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def prefill_worker(ctx: typer.Context) -> None:
    """Run one prefill worker in this process. `decant prefill-worker --help` shows its settings."""
    from decant.prefill_worker.main import main

    raise SystemExit(main(ctx.args))


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def decode_worker(ctx: typer.Context) -> None:
    """Run one decode worker in this process. `decant decode-worker --help` shows its settings."""
    from decant.decode_worker.main import main

    raise SystemExit(main(ctx.args))


def _prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise CommandFailed("PROMPT: a text, or '-' for standard input", status=2)
    return sys.stdin.read()


def _tls(ca: Path | None, certificate: Path | None, key: Path | None, name: str | None) -> Tls | None:
    files: dict[str, Any] = {"ca": ca, "certificate": certificate, "key": key, "name": name}
    if not any(files.values()):
        return None
    if (certificate is None) != (key is None):
        raise CommandFailed("--certificate and --key come together", status=2)
    return Tls(**files)
