"""Every command and its options. What a command needs is imported when it runs."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from decant.client.channel import Tls
from decant.client.options import Options, Prompt
from decant.command import deployments
from decant.command.deployments import Deployment
from decant.command.errors import CommandFailed, said_in_one_line
from decant.command.waiting import Waiting

app = typer.Typer(
    name="decant",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        print(f"decant {version('decant-llm')}")
        raise typer.Exit


@app.callback()
def decant(
    asked: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    """Serves large language models, prompts and answers on separate pools of workers."""


Json = Annotated[bool, typer.Option("--json", help="One JSON document instead.")]
RedisUrl = Annotated[
    str | None, typer.Option(help="Redis of the deployment; unset: of the one that runs here.", show_default=False)
]
Ca = Annotated[Path | None, typer.Option(help="PEM roots that the server's certificate chains to; turns TLS on.")]
Certificate = Annotated[Path | None, typer.Option(help="PEM chain of this client, with --key.")]
Key = Annotated[Path | None, typer.Option(help="PEM key of --certificate.")]
ServerName = Annotated[str | None, typer.Option(help="Name in the server's certificate, if it is another.")]


@app.command()
def generate(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    prompt: Annotated[str | None, typer.Argument(help="Text; '-' or nothing reads standard input.")] = None,
    address: Annotated[
        str | None, typer.Option(help="host:port of a router, several with commas between; unset: those that run here.")
    ] = None,
    chat: Annotated[bool, typer.Option(help="PROMPT is a user's message: the model's chat template is used.")] = False,
    model: Annotated[str | None, typer.Option(help="Id or alias; unset: the server's default.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to write at most; unset: the window.")] = None,
    min_tokens: Annotated[int | None, typer.Option(help="Tokens before it may stop by itself.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of probability that is drawn from.")] = None,
    top_k: Annotated[int | None, typer.Option(help="How many of the likeliest are drawn from; 0: all.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Least share of the likeliest's probability.")] = None,
    frequency_penalty: Annotated[float | None, typer.Option(help="Times a token's count in the answer.")] = None,
    presence_penalty: Annotated[float | None, typer.Option(help="Once for a token in the answer.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Counts prompt and answer; 1 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends it; may be repeated.")] = None,
    stop_token_ids: Annotated[
        list[int] | None, typer.Option("--stop-token-id", help="A token that ends it; may be repeated.")
    ] = None,
    ignore_eos: Annotated[bool | None, typer.Option(help="Go on past the model's own end.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="Alternatives per token, in --json.")] = None,
    token_ids: Annotated[bool | None, typer.Option(help="Also the ids of the tokens, in --json.")] = None,
    priority: Annotated[int | None, typer.Option(help="Larger is more urgent.")] = None,
    request_id: Annotated[str | None, typer.Option(help="Unset: one is made up.")] = None,
    timeout: Annotated[float | None, typer.Option(min=0, help="Seconds until its deadline.")] = None,
    wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds to wait for a deployment here; unset: 60 for one that starts or restarts."),
    ] = None,
    as_json: Json = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
) -> None:
    """Asks a deployment and shows the answer as it is written.

    The answer goes to standard output, its times and its path through the workers to standard error.
    """
    from decant.command import generate as generating

    with said_in_one_line():
        text = _prompt(prompt)
        given: Prompt = [{"role": "user", "content": text}] if chat else text
        options = {name: value for name, value in ctx.params.items() if name in Options.__annotations__}
        asked = cast(Options, {k: v for k, v in options.items() if v not in (None, [], ())})
        asking = generating.GenerateArgs(address or "", _tls(ca, certificate, key, server_name), timeout, as_json)
        if address is None:
            line = generating.run_here(asking, given, asked, Waiting("--address", wait))
        else:
            line = generating.run(asking, given, asked)
        if not as_json:
            print(line, file=sys.stderr)


@app.command()
def status(
    redis_url: RedisUrl = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it every second, until Ctrl-C.")] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until a deployment here has started.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Routers and workers: their state, what they serve and how loaded they are.

    States: starting, loading 40 %, warming up (these only of a deployment on this machine), ready, draining,
    lost 3 s ago.
    """
    from decant.command import status as showing

    with said_in_one_line():
        if redis_url is not None:
            deployment = deployments.with_redis(redis_url)
        elif wait:
            deployment = Waiting("--redis-url", wait).deployment()
        else:
            deployment = deployments.newest("--redis-url")
        url = redis_url or cast(Deployment, deployment).redis_url
        showing.run(url, as_json=as_json, deployment=deployment, watch=watch)


@app.command()
def audit(  # noqa: PLR0913 - a command's options are its parameters
    redis_url: RedisUrl = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until a deployment here has started.")] = 0.0,
    as_json: Json = False,
    ca: Ca = None,
    certificate: Certificate = None,
    key: Key = None,
    server_name: ServerName = None,
) -> None:
    """Every block of every worker, accounted for.

    Ends with 1 where something doesn't add up, with 2 where there is no worker to ask. Workers of a deployment that
    runs here are called with its certificates, others with --ca, --certificate and --key.
    """
    from decant.command import audit as auditing

    with said_in_one_line():
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
        str | None, typer.Option(help="Folder or hub name; unset: the small one that comes along.")
    ] = None,
    router: Annotated[int, typer.Option(min=1, help="Routers.")] = 1,
    prefill: Annotated[int, typer.Option(min=0, help="Workers that read prompts.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Workers that write answers.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the first router, others follow; 0: free ones.")
    ] = 50051,
    host: Annotated[str, typer.Option(help="Where routers listen; 0.0.0.0 or :: for all.")] = "127.0.0.1",
    redis_url: Annotated[str | None, typer.Option(help="A Redis that is there; unset: one of its own.")] = None,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: auto, bfloat16, float16 or float32.")] = "auto",
    kv_memory: Annotated[str | None, typer.Option(help="For each worker's KV cache: 512M, 2G; unset: a share.")] = None,
    ready_seconds: Annotated[float, typer.Option(min=1, help="For everything to become ready.")] = 600.0,
    log_format: Annotated[str, typer.Option(help="auto, json or console; auto: columns on a terminal.")] = "auto",
) -> None:
    """A whole deployment on this machine: Redis, workers, routers, each a process of its own.

    Cores and memory are divided among the workers. Variables DECANT_* are passed on to the processes whose settings
    they are. Ctrl-C ends it in order, a second one at once; nothing is left afterwards.
    """
    from decant.command import up as starting

    with said_in_one_line():
        raise SystemExit(starting.run(starting.UpOptions(**ctx.params)))


@app.command()
def demo() -> None:
    """Starts a deployment with the small model, asks it something, shows what each worker did, and ends it."""
    from decant.command import demo as showing

    with said_in_one_line():
        showing.run()


_AS_IT_IS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=_AS_IT_IS, add_help_option=False)
def router(ctx: typer.Context) -> None:
    """One router, in this process. `decant router --help` shows its settings."""
    from decant.router.main import main

    raise SystemExit(main(ctx.args))


@app.command(context_settings=_AS_IT_IS, add_help_option=False)
def prefill_worker(ctx: typer.Context) -> None:
    """One prefill worker, in this process. `decant prefill-worker --help` shows its settings."""
    from decant.prefill_worker.main import main

    raise SystemExit(main(ctx.args))


@app.command(context_settings=_AS_IT_IS, add_help_option=False)
def decode_worker(ctx: typer.Context) -> None:
    """One decode worker, in this process. `decant decode-worker --help` shows its settings."""
    from decant.decode_worker.main import main

    raise SystemExit(main(ctx.args))


def _prompt(given: str | None) -> str:
    if given is not None and given != "-":
        return given
    if given is None and sys.stdin.isatty():
        raise CommandFailed("PROMPT: a text, or '-' for standard input", status=2)
    return sys.stdin.read()


def _tls(ca: Path | None, certificate: Path | None, key: Path | None, name: str | None) -> Tls | None:
    given: dict[str, Any] = {"ca": ca, "certificate": certificate, "key": key, "name": name}
    if not any(given.values()):
        return None
    if (certificate is None) != (key is None):
        raise CommandFailed("--certificate and --key come together", status=2)
    return Tls(**given)
