from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, cast

import typer

from decant.client.channel import Tls
from decant.command import options as opt
from decant.command.bench.benchmark import bench
from decant.command.deployment import deployments
from decant.command.deployment.deployments import Deployment
from decant.command.deployment.waiting import Waiting
from decant.command.errors import one_line_errors
from decant.command.plan import plan
from decant.command.up.options import UpOptions

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


@app.command()
def generate(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    prompt: opt.PromptText = None,
    address: opt.Address = None,
    chat: opt.Chat = False,
    tools: opt.Tools = None,
    tool_choice: opt.ToolChoice = None,
    model: opt.ModelId = None,
    lora_name: opt.LoraName = None,
    max_tokens: opt.MaxTokens = None,
    min_tokens: opt.MinTokens = None,
    max_reasoning_tokens: opt.MaxReasoningTokens = None,
    reasoning: opt.Reasoning = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    frequency_penalty: opt.FrequencyPenalty = None,
    presence_penalty: opt.PresencePenalty = None,
    repetition_penalty: opt.RepetitionPenalty = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    stop_token_ids: opt.StopTokenIds = None,
    ignore_eos: opt.IgnoreEos = None,
    parse_special_tokens: opt.ParseSpecialTokens = None,
    json_schema: opt.JsonSchema = None,
    regex: opt.Regex = None,
    ebnf_grammar: opt.Grammar = None,
    choice: opt.Choice = None,
    json_object: opt.JsonObject = None,
    logprobs: opt.Logprobs = None,
    token_ids: opt.TokenIds = None,
    priority: opt.Priority = None,
    request_id: opt.RequestId = None,
    timeout: opt.Timeout = None,
    wait: opt.WaitForStart = None,
    as_json: opt.Json = False,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Send a prompt to a deployment and print the output as it is generated.

    The output goes to standard output, its times and workers to standard error.
    """
    from decant.command.generate import run_command

    run_command(ctx.params)


@app.command()
def status(
    redis_url: opt.RedisUrl = None, watch: opt.Watch = False, wait: opt.Wait = 0.0, as_json: opt.Json = False
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
def top(
    addresses: opt.AdminAddresses = None,
    once: opt.Once = False,
    interval: opt.Interval = 1.0,
    as_json: opt.Json = False,
) -> None:
    """Show both pools live: load, KV cache, rates and latency of the last minute, and the requests in flight.

    Reads the admin ports of the deployment on this machine, or the given ones. Rates and latency are of the last 60 s,
    as far as `decant top` has read; with --once of one interval. Ctrl-C ends it.
    """
    from decant.command.top import command as showing

    with one_line_errors():
        showing.run(showing.TopOptions(tuple(addresses or ()), once, interval, as_json))


@app.command()
def audit(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    as_json: opt.Json = False,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Check that every KV block of every worker has an owner.

    Ends with 1 if the blocks of a worker do not add up, with 2 if there is no worker. Workers of a deployment on this
    machine are called with its certificates, others with --ca, --certificate and --key.
    """
    from decant.command import audit as auditing

    with one_line_errors():
        if not auditing.run(*_directory_of(ctx.params), as_json=as_json):
            raise SystemExit(1)


@app.command()
def requests(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    as_json: opt.Json = False,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """List the requests in flight on every router, without their texts, for an administrator.

    Routers list them for the certificate of --admin-name alone. On a router's machine `decant top` lists them too.
    Ends with 1 if a router does not answer, with 2 if there is no router.
    """
    from decant.command import requests as listing

    with one_line_errors():
        redis, _ = _directory_of(ctx.params)  # a deployment's own TLS is that of its workers
        if not listing.run(redis, opt.tls_from(ctx.params), as_json=as_json):
            raise SystemExit(1)


@app.command()
def drain(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    worker: opt.WorkerId,
    undo: opt.Undo = False,
    timeout: opt.DrainTimeout = 60.0,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Take a worker out of service, and wait until its sequences have moved to others or ended.

    The worker takes no more runs and its process runs on: end it then, or put it back with --undo. It may be repeated.
    Ends with 1 if runs are left after --timeout; the worker remains drained.
    """
    from decant.command import drain as draining

    with one_line_errors():
        redis, tls = _directory_of(ctx.params)
        if undo:
            draining.undo(redis, tls, worker)
        else:
            draining.drain(redis, tls, worker, timeout)


@app.command()
def move(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    worker: opt.WorkerId,
    role: opt.NewWorkerRole,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Move a worker to the other pool, without a restart: what runs there goes on.

    A role is a preference of the routers, which learn the new one within a second. A restart returns the worker to the
    role in which it was started.
    """
    from decant.command.move import move as moving

    with one_line_errors():
        moving(*_directory_of(ctx.params), worker, role)


@app.command()
def add_adapter(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    adapter: opt.AdapterEntry,
    worker: opt.WorkerIds = None,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Have workers serve a LoRA adapter, in place of what its name stood for, without a restart.

    Requests that run keep what they have. Workers need --adapters, --adapter-directory or --adapter-memory. A restart
    returns a worker to the adapters with which it was started.
    """
    from decant.command import adapters

    with one_line_errors():
        adapters.add(*_directory_of(ctx.params), adapter, worker or ())


@app.command()
def remove_adapter(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    name: opt.AdapterName,
    worker: opt.WorkerIds = None,
    redis_url: opt.RedisUrl = None,
    wait: opt.Wait = 0.0,
    ca: opt.Ca = None,
    certificate: opt.Certificate = None,
    key: opt.Key = None,
    server_name: opt.ServerName = None,
) -> None:
    """Have workers serve a LoRA adapter no more. Requests that run keep it, and its memory is free after them."""
    from decant.command import adapters

    with one_line_errors():
        adapters.remove(*_directory_of(ctx.params), name, worker or ())


@app.command()
def scale_advice(
    redis_url: opt.RedisUrl = None, wait: opt.Wait = 0.0, seconds: opt.AdviceSeconds = 5.0, as_json: opt.Json = False
) -> None:
    """Say how many workers each pool lacks or can spare, by its load of some seconds.

    One line for each model. It changes nothing.
    """
    from decant.command import scale_advice as advising

    with one_line_errors():
        redis_url = redis_url or Waiting("--redis-url", wait).deployment().redis_url
        advising.run(redis_url, seconds, as_json=as_json)


def _directory_of(params: dict[str, Any]) -> tuple[str, Tls | None]:
    """Redis that lists the processes, and TLS to call them: of the deployment on this machine, or as given."""
    tls, redis_url = opt.tls_from(params), params["redis_url"]
    if redis_url is None:
        deployment = Waiting("--redis-url", params["wait"]).deployment()
        return deployment.redis_url, tls or deployment.peer_tls
    if tls is None and (record := deployments.with_redis(redis_url)) is not None:
        tls = record.peer_tls
    return redis_url, tls


@app.command()
def up(  # noqa: PLR0913 - a command's options are its parameters
    ctx: typer.Context,
    model: opt.ModelSource = UpOptions.model,
    router: opt.Routers = UpOptions.router,
    prefill: opt.PrefillWorkers = UpOptions.prefill,
    decode: opt.DecodeWorkers = UpOptions.decode,
    port: opt.Port = UpOptions.port,
    gateway: opt.GatewayPort = UpOptions.gateway,
    openai: opt.OpenAiPort = UpOptions.openai,
    host: opt.Host = UpOptions.host,
    redis_url: opt.RedisToUse = UpOptions.redis_url,
    dtype: opt.Dtype = UpOptions.dtype,
    kv_memory: opt.KvMemory = UpOptions.kv_memory,
    adapters: opt.Adapters = None,
    adapter_memory: opt.AdapterMemory = UpOptions.adapter_memory,
    ready_seconds: opt.ReadySeconds = UpOptions.ready_seconds,
    log_format: opt.LogFormat = UpOptions.log_format,
) -> None:
    """Run a deployment on this machine: Redis, workers and routers, each in its own process.

    Workers share the cores and the memory. Each process gets the variables DECANT_* of its settings. Ctrl-C drains the
    deployment, a second one ends it at once; no process or file is left.
    """
    from decant.command.up import command as starting

    with one_line_errors():
        options = {**ctx.params, "adapters": tuple(adapters or ())}
        raise SystemExit(starting.run(UpOptions(**options)))


@app.command()
def demo() -> None:
    """Start a deployment with the small model, send one prompt, show what each worker did, and end it."""
    from decant.command import demo as showing

    with one_line_errors():
        showing.run()


app.command()(plan)
app.add_typer(bench, name="bench")


_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def router(ctx: typer.Context) -> None:
    """Run one router in this process. `decant router --help` shows its settings."""
    from decant.router.main import main

    raise SystemExit(main(ctx.args))


@app.command(context_settings=_PASS_THROUGH, add_help_option=False)
def gateway(ctx: typer.Context) -> None:
    """Run a gateway in this process: OpenAI's API over HTTP. `decant gateway --help` shows its settings."""
    from decant.gateway.main import main

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
