from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from google.protobuf.json_format import MessageToDict

from decant import Cancelled, Client, Options, Prompt, ServiceError, Stream, Tls, Unavailable
from decant.client.results import Output
from decant.client.retry import may_pass
from decant.command.deployment import deployments
from decant.command.deployment.waiting import Waiting
from decant.command.errors import CommandFailed, one_line_errors
from decant.command.options import tls_from

TOKEN = "DECANT_TOKEN"
"""The tenant's secret; other users can read command lines."""

RESUME_SECONDS = 30.0
"""The default of the client."""

UNSET: tuple[Any, ...] = (None, [], ())
"""Values of options that are not given."""


@dataclass
class Clock:
    sent: float
    first: float | None = None
    last: float | None = None

    def token(self) -> None:
        self.last = time.monotonic()
        if self.first is None:
            self.first = self.last

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first is None else (self.first - self.sent) * 1000

    @property
    def e2e_ms(self) -> float | None:
        return None if self.last is None else (self.last - self.sent) * 1000

    def tpot_ms(self, tokens: int) -> float | None:
        if self.first is None or self.last is None or tokens < 2:
            return None
        return (self.last - self.first) * 1000 / (tokens - 1)


@dataclass(frozen=True)
class GenerateArgs:
    address: str | Sequence[str]
    tls: Tls | None = None
    timeout: float | None = None
    as_json: bool = False
    wait: float = 0.0
    """Least seconds to wait for a router that is away; the client may wait longer."""
    waits: bool = True
    """Wait for a router that is away. False: raise Unavailable at once if nothing has been received."""


def run_command(params: dict[str, Any]) -> None:
    with one_line_errors():
        text = _read_prompt(params["prompt"])
        tools = _read_tools(params["tools"])
        is_chat = params["chat"] or tools is not None
        prompt: Prompt = [{"role": "user", "content": text}] if is_chat else text
        values = {name: _value(params.get(name)) for name in Options.__annotations__} | {"tools": tools}
        options = cast(Options, {name: value for name, value in values.items() if value not in UNSET})
        tls, as_json = tls_from(params), params["as_json"]
        args = GenerateArgs(params["address"] or "", tls, params["timeout"], as_json, wait=params["wait"] or 0.0)
        if params["address"] is None:
            line = run_here(args, prompt, options, Waiting("--address", params["wait"]))
        else:
            line = run(args, prompt, options)
        if not as_json:
            print(line, file=sys.stderr)


def _value(given: Any) -> Any:
    """Value of an option: the text of a file."""
    if not isinstance(given, Path):
        return given
    try:
        return given.read_text(encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{given}: {error.strerror}", status=2) from None
    except UnicodeDecodeError:
        raise CommandFailed(f"{given}: a text in UTF-8", status=2) from None


def _read_prompt(argument: str | None) -> str:
    if argument is not None and argument != "-":
        return argument
    if argument is None and sys.stdin.isatty():
        raise CommandFailed("PROMPT: a text, or '-' for standard input", status=2)
    return sys.stdin.read()


def _read_tools(file: Path | None) -> list[Any] | None:
    if file is None:
        return None
    try:
        tools = json.loads(_value(file))
    except ValueError as error:
        raise CommandFailed(f"--tools: {file} is not JSON: {error}", status=2) from None
    if not isinstance(tools, list):
        raise CommandFailed(f"--tools: {file}: a list of tools", status=2)
    return tools


def run(args: GenerateArgs, prompt: Prompt, options: Options) -> str:
    """Print the output; return the summary. Raises ServiceError, but CommandFailed for Unavailable after any output."""
    try:
        resume_seconds = max(args.wait, RESUME_SECONDS)
        token = os.environ.get(TOKEN) or None
        client = Client(args.address, tls=args.tls, token=token, resume_seconds=resume_seconds)
    except ValueError as error:
        parameter, _, limit = str(error).partition(":")
        where = {"address": "--address", "token": TOKEN}[parameter]
        raise CommandFailed(f"{where}:{limit}", status=2) from None
    except OSError as error:
        raise CommandFailed(f"{error.filename}: {error.strerror}") from None
    clock = Clock(time.monotonic())
    with client, client.stream(prompt, timeout=args.timeout, **options) as stream, _until_ctrl_c(client, stream):
        client._routers.on_wait = _WaitReport(stream, _starting_here(args.address), waits=args.waits)
        try:
            _show(stream, clock, as_json=args.as_json, has_several=(options.get("n") or 1) > 1)
        except Unavailable as error:
            if stream.seq:
                raise CommandFailed(str(error)) from None
            raise
    if args.as_json:
        print(json.dumps(account(stream, clock)))
    else:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return summary(stream, clock)


def _starting_here(address: str | Sequence[str]) -> str:
    """Return a hint if the address may be that of a deployment of this machine that is starting."""
    hosts = {one.strip().rpartition(":")[0] for one in str(address).split(",")}
    if not hosts & {"localhost", "127.0.0.1", "[::1]"}:
        return ""
    with contextlib.suppress(CommandFailed):
        for one in deployments.running():
            if not one.has_started:
                return f"; `decant up` (process {one.pid}) is starting"
    return ""


def run_here(args: GenerateArgs, prompt: Prompt, options: Options, waiting: Waiting) -> str:
    while True:
        deployment = waiting.deployment()
        try:
            return run(replace(args, address=deployment.addresses, waits=False), prompt, options)
        except Unavailable:
            if not waiting.for_restart(deployment):
                raise


class _WaitReport:
    """Report that the first message waits for a router, each reason once in a row; see `GenerateArgs.waits`."""

    def __init__(self, stream: Stream, hint: str, *, waits: bool) -> None:
        self._stream = stream
        self._hint = hint
        self._waits = waits
        self._last = ""

    def __call__(self, error: ServiceError) -> None:
        if self._stream.seq or not may_pass(error):
            return
        if not self._waits:
            raise error
        if (text := str(error)) != self._last:
            self._last = text
            _print_status(f"{text}{self._hint}; trying again")


def _show(stream: Stream, clock: Clock, *, as_json: bool, has_several: bool) -> None:
    """Print the output as it comes; several outputs one after the other, at the end."""
    resumed = 0
    for delta in stream:
        if delta.num_tokens:
            clock.token()
        for router in stream.resumed_at[resumed:]:
            _print_status(f"resumed at {router}")
        resumed = len(stream.resumed_at)
        if not as_json and not has_several:
            if delta.reasoning:
                sys.stderr.write(delta.reasoning)
                sys.stderr.flush()
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    if as_json:
        return
    if has_several:
        sys.stdout.write("\n".join(f"--- output {output.index}\n{_shown(output)}" for output in stream.outputs))
    elif stream.tool_calls:
        sys.stdout.write("".join(_call_lines(stream.outputs[0])))


def _shown(output: Output) -> str:
    return output.text + "".join(_call_lines(output))


def _call_lines(output: Output) -> Iterator[str]:
    for place, call in enumerate(output.tool_calls):
        line = f"{call.name}({call.arguments})"
        yield f"\n{line}" if place or output.text else line


def _print_status(line: str) -> None:
    print(f"\x1b[2m{line}\x1b[0m" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _until_ctrl_c(client: Client, stream: Stream) -> Iterator[None]:
    """Cancel the request at Ctrl-C, then raise KeyboardInterrupt; a second one is raised at once. Raised inside gRPC it
    could be lost, or leave a lock locked.
    """
    is_interrupted = False

    def disconnect(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        stream.disconnect()

    before = signal.signal(signal.SIGINT, disconnect)
    try:
        yield
    except Cancelled:
        if not is_interrupted:
            raise
        with contextlib.suppress(ServiceError):
            client.cancel(stream.request_id)
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


def account(stream: Stream, clock: Clock) -> dict[str, Any]:
    usage, receipt = stream.usage, stream.receipt
    tokens = usage.completion_tokens if usage else 0
    outputs = [_output(output) for output in stream.outputs]
    return {
        "request_id": stream.request_id,
        "model": stream.started.model if stream.started else None,
        "seed": stream.started.seed if stream.started else None,
        **(outputs[0] if len(outputs) == 1 else {"outputs": outputs}),
        "ttft_ms": clock.ttft_ms,
        "tpot_ms": clock.tpot_ms(tokens),
        "e2e_ms": clock.e2e_ms,
        "usage": asdict(usage) if usage else None,
        "receipt": asdict(receipt) if receipt else None,
        "resumed_at": stream.resumed_at,
    }


def _output(output: Output) -> dict[str, Any]:
    finished = output.finished
    return {
        "text": output.text,
        "reasoning": output.reasoning,
        "tool_calls": [asdict(call) for call in output.tool_calls],
        "token_ids": list(output.token_ids),
        "logprobs": [_message(logprob) for logprob in output.logprobs],
        "finish_reason": finished.reason if finished else None,
        "stop": finished.stop if finished else None,
    }


def summary(stream: Stream, clock: Clock) -> str:
    usage, receipt = stream.usage, stream.receipt
    finished = dict.fromkeys(output.finished.reason.value for output in stream.outputs if output.finished)
    tokens = usage.completion_tokens if usage else 0
    parts = [f"ttft {_ms(clock.ttft_ms)}", f"tpot {_ms(clock.tpot_ms(tokens))}", f"{tokens} tokens"]
    if usage:
        cached = f", {usage.cached_prompt_tokens} of them cached" if usage.cached_prompt_tokens else ""
        parts.append(f"prompt {usage.prompt_tokens}{cached}")
    if finished:
        parts.append(", ".join(finished))
    if receipt:
        path = " -> ".join(name for name in (receipt.prefill_worker, receipt.decode_worker) if name)
        moved = f" ({receipt.handoff_bytes / 1024:.0f} KiB moved)" if receipt.handoff_bytes else ""
        parts.append(f"{path}{moved}" if path else "no worker")
        if receipt.attempts > 1:
            parts.append(f"{receipt.attempts} attempts")
    return " | ".join(parts)


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _message(message: Any) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
