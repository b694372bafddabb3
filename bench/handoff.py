"""A KV cache handoff between two processes, beside a bare gRPC byte stream between the same two.

    python -m bench.handoff [--model qwen2.5-0.5b] [--mib 128] [--runs 15] [--prompts 5] [--json OUT]

moving     only the transfer of a computed prompt, until the sequence has joined; over plaintext and mutual TLS, in turn
           with the bare stream, which sends as many messages of 1 MiB and discards them
stepping   how much a handoff slows a step. Each side is a real engine on one thread:
           all at once     eight sequences decode on one side: alone, beside bare streams, and beside handoffs of an
                           existing cache at full speed, the worst case
           as it is read   the sender computes a prompt while eight sequences decode at the receiver, with and without
                           a fetch: the cost of a request

With fewer than four free cores the bare stream slows steps too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc
from rich.console import Console
from rich.progress import track

from bench.kv_endpoints import End, Span, Steps, seconds
from bench.options import add_json, positive, write_result
from decant.bench.model_shapes import checkpoint
from decant.engine.errors import InvalidConfig
from decant.handoff.packing import MESSAGE_BYTES
from decant.handoff.service import KvSourceService
from decant.handoff.transport import GrpcSource, GrpcTransport
from decant.protos import worker_pb2 as wire
from decant.runtime.connections import certificates
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls, ServerTls, server_credentials
from decant.runtime.grpc_options import NO_PROXY

GOAL = 0.8
STEP_GOAL = 1.2
PROMPT_TOKENS = 1792
ENDS = ("sender", "receiver")


# -- the sender's process ----------------------------------------------------------------------------------------


async def migrate(model: Path, mib: int, tls: ServerTls) -> None:
    """Serve as the sender until standard input closes; print the ports for plaintext and for `tls`."""
    end = End("sender", model, mib)

    async def offer(name: str, tokens: int, computed: bool) -> wire.Ticket:
        ticket = await end.offer(name, tokens, computed=computed)
        if not computed:
            await end.happened(name)
        return ticket

    async def read(name: str, tokens: int) -> None:
        ticket = await end.offer(name, tokens, computed=True)
        await end.happened(name)
        end.sender.cancel(ticket.id, wire.Failure(cause=wire.CAUSE_CANCELLED))

    async def answer(request: bytes, _: Any) -> bytes:
        words = json.loads(request)
        match words.pop("do"):
            case "offer":
                return (await offer(**words)).SerializeToString()
            case "read":
                await read(**words)
            case "busy":
                await end.busy()
            case "rest":
                return json.dumps(await end.rest()).encode()
        return b""

    async def bare(request: bytes, _: Any) -> AsyncIterator[bytes]:
        message = bytes(MESSAGE_BYTES)
        for _index in range(mib):
            yield message

    server = grpc.aio.server()
    KvSourceService(end.sender).add_to(server)
    methods: dict[str, Any] = {
        "Bare": grpc.unary_stream_rpc_method_handler(bare),
        "Ask": grpc.unary_unary_rpc_method_handler(answer),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", methods),))
    credentials = server_credentials(tls)
    assert credentials is not None
    print(server.add_insecure_port("127.0.0.1:0"), server.add_secure_port("127.0.0.1:0", credentials), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await end.loop.stop()


# -- the receiver's process --------------------------------------------------------------------------------------


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, [*NO_PROXY, ("grpc.max_receive_message_length", 4 * MESSAGE_BYTES)])


class Pair:
    def __init__(self, end: End, address: str, tls_address: str, tls: PeerTls) -> None:
        self.end = end
        self._channel = connect(address)
        self._transport = GrpcTransport(connect)
        self._tls_transport = GrpcTransport(partial(open_channel, tls=tls))
        self._plain_source = self._transport.source(address)
        self._tls_source = self._tls_transport.source(tls_address)
        self._names = (f"prompt-{number}" for number in count())

    async def ask(self, do: str, **words: object) -> bytes:
        call: Any = self._channel.unary_unary("/bench.Bench/Ask")
        answer: bytes = await call(json.dumps({"do": do, **words}).encode())
        return answer

    async def bare(self) -> Span:
        began, received = time.monotonic(), 0
        stream: Any = self._channel.unary_stream("/bench.Bench/Bare")
        async for message in stream(b""):
            received += len(message)
        return Span(began, time.monotonic())

    async def handoff(self) -> Span:
        return await self._adopt_for_client(self._plain_source, self.end.tokens, computed=False)

    async def tls(self) -> Span:
        return await self._adopt_for_client(self._tls_source, self.end.tokens, computed=False)

    async def fetched(self) -> Span:
        return await self._adopt_for_client(self._plain_source, PROMPT_TOKENS, computed=True)

    async def unfetched(self) -> Span:
        began = time.monotonic()
        await self.ask("read", name=next(self._names), tokens=PROMPT_TOKENS)
        return Span(began, time.monotonic())

    async def _adopt_for_client(self, source: GrpcSource, tokens: int, *, computed: bool) -> Span:
        name = next(self._names)
        ticket = wire.Ticket.FromString(await self.ask("offer", name=name, tokens=tokens, computed=computed))
        request = self.end.request(name, tokens, park=False)
        arrival = await self.end.loop.call(lambda engine: engine.transfers.reserve(request))
        began = time.monotonic()
        await self.end.receiver.receive(source, ticket, arrival)
        took = Span(began, time.monotonic())
        await self.end.happened(name)
        return took

    async def close(self) -> None:
        await self.end.receiver.close()
        await self._channel.close()
        await self._transport.close()
        await self._tls_transport.close()
        await self.end.loop.stop()
        self.end.engine.check_integrity()


class Stepper(Protocol):
    async def busy(self) -> None: ...
    async def rest(self) -> Steps: ...


class SenderSteps:
    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def busy(self) -> None:
        await self._pair.ask("busy")

    async def rest(self) -> Steps:
        rest = json.loads(await self._pair.ask("rest"))
        return Steps(*([Span(*step) for step in steps] for steps in rest))


# -- measurements ------------------------------------------------------------------------------------------------

Move = Callable[[], Awaitable[Span]]


class Length(NamedTuple):
    runs: int  # number of caches transferred, and of bare streams
    seconds: float  # duration of decoding beside each load
    prompts: int  # prompts fetched during computation, and as many without a fetch


async def measure(model: Path, mib: int, length: Length, console: Console) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return await _measure(model, mib, length, console, certificates.make(Path(folder, "tls")))


async def _measure(
    model: Path, mib: int, length: Length, console: Console, files: certificates.PeerFiles
) -> dict[str, Any]:
    end = End("receiver", model, mib)
    command = [sys.executable, "-m", "bench.handoff", "--mib", str(mib), "--model", str(model)]
    command += ["--give", str(files.ca.parent)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        plain, secure = (f"127.0.0.1:{int(port)}" for port in (await process.stdout.readline()).split())
        tls = PeerTls(peer_ca=files.ca, peer_certificate=files.certificate, peer_key=files.key)
        pair = Pair(end, plain, secure, tls)
        moves: dict[str, Move] = {"bare": pair.bare, "handoff": pair.handoff, "tls": pair.tls}
        taken: dict[str, list[float]] = {name: [] for name in moves}
        for _ in track(range(length.runs + 1), "moving", console=console, transient=True):
            for name, move in moves.items():
                span = await move()
                taken[name].append(span.ended - span.began)
        figures: dict[str, Any] = {f"{name}_s": took[1:] for name, took in taken.items()}
        steppers: dict[str, Stepper] = {"sender": SenderSteps(pair), "receiver": pair.end}
        at_once = track(steppers.items(), "stepping, all at once", console=console, transient=True)
        figures["all_at_once"] = {
            name: await decodes_beside(stepper, moves, length.seconds) for name, stepper in at_once
        }
        pairs = [
            await prompt_beside(pair, steppers)
            for _ in track(range(length.prompts), "stepping, as it is read", console=console, transient=True)
        ]
        figures["as_it_is_read"] = {key: [one[key] for one in pairs] for key in pairs[0]}
        await pair.close()
    finally:
        process.stdin.close()
        await process.wait()
    return figures


async def decodes_beside(stepper: Stepper, moves: dict[str, Move], least: float) -> dict[str, dict[str, float]]:
    async def nothing() -> Span:
        began = time.monotonic()
        await asyncio.sleep(least)
        return Span(began, time.monotonic())

    step_ms, move_s = {}, {}
    for name, move in {"alone": nothing, **moves}.items():
        await stepper.busy()  # restarted each time: a step takes longer with more context
        until, spans = time.monotonic() + least, list[Span]()
        while time.monotonic() < until:
            spans.append(await move())
        step_ms[name] = 1e3 * statistics.median(seconds((await stepper.rest()).decodes, spans))
        move_s[name] = statistics.median(span.ended - span.began for span in spans)
    return {"step_ms": step_ms, "move_s": {name: move_s[name] for name in moves}}


async def prompt_beside(pair: Pair, steppers: dict[str, Stepper]) -> dict[str, float]:
    figures = {}
    for name, move in {"unfetched": pair.unfetched, "fetched": pair.fetched}.items():
        await steppers["receiver"].busy()
        span = await move()
        prompts, decodes = (await steppers["sender"].rest()).prompts, (await steppers["receiver"].rest()).decodes
        figures[f"{name}_prompt_s"] = sum(step.ended - step.began for step in prompts)
        figures[f"{name}_step_ms"] = 1e3 * statistics.median(seconds(decodes, [span]))
    return figures


# -- results -----------------------------------------------------------------------------------------------------


def report(mib: int, figures: dict[str, Any]) -> dict[str, Any]:
    ratios = _ratios(figures["bare_s"], figures["handoff_s"])
    at_once, as_read = figures["all_at_once"], figures["as_it_is_read"]
    steps = {end: at_once[end]["step_ms"] for end in ENDS}
    return {
        "mib": mib,
        **figures,
        "mib_per_s": {name: mib / statistics.median(figures[f"{name}_s"]) for name in ("bare", "handoff", "tls")},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
        "tls_ratio": statistics.median(_ratios(figures["handoff_s"], figures["tls_s"])),
        "goal": GOAL,
        "step_slower": {
            "all_at_once": {end: step["handoff"] / step["alone"] for end, step in steps.items()},
            "as_it_is_read": {
                "sender": statistics.median(_ratios(as_read["fetched_prompt_s"], as_read["unfetched_prompt_s"])),
                "receiver": statistics.median(_ratios(as_read["fetched_step_ms"], as_read["unfetched_step_ms"])),
            },
        },
        "step_goal": STEP_GOAL,
    }


def _ratios(ones: list[float], others: list[float]) -> list[float]:
    return [one / other for one, other in zip(ones, others, strict=True)]


def show(result: dict[str, Any], console: Console) -> None:
    rates, (low, high) = result["mib_per_s"], result["ratio_quartiles"]
    console.print(
        f"bare stream {rates['bare']:.0f} MiB/s, handoff {rates['handoff']:.0f} MiB/s: "
        f"{result['ratio']:.0%} of it, quartiles {low:.0%} and {high:.0%} (goal {GOAL:.0%})"
    )
    console.print(f"over mutual TLS {rates['tls']:.0f} MiB/s: {result['tls_ratio']:.0%} of a handoff in plaintext")
    at_once, as_read = result["all_at_once"], result["as_it_is_read"]
    slower = result["step_slower"]
    for end in ENDS:
        step, rate = at_once[end]["step_ms"], result["mib"] / at_once[end]["move_s"]["handoff"]
        console.print(
            f"all at once: a step of the {end} {step['alone']:.1f} ms alone, {step['bare']:.1f} beside a bare stream, "
            f"{step['handoff']:.1f} beside a handoff ({rate:.0f} MiB/s): {slower['all_at_once'][end]:.2f} times "
            f"(goal {STEP_GOAL}), {step['tls']:.1f} beside one over TLS"
        )
    prompt, step = (
        [statistics.median(as_read[f"{name}_{what}"]) for name in ("unfetched", "fetched")]
        for what in ("prompt_s", "step_ms")
    )
    console.print(
        f"as it is read: a prompt {prompt[0]:.2f} s not fetched, {prompt[1]:.2f} s fetched: "
        f"{slower['as_it_is_read']['sender']:.2f} times (goal {STEP_GOAL}); a step of the receiver beside it "
        f"{step[0]:.1f} and {step[1]:.1f} ms: {slower['as_it_is_read']['receiver']:.2f} times (goal {STEP_GOAL})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a folder, or a shape")
    parser.add_argument("--mib", type=positive, default=128, help="size of the cache")
    parser.add_argument("--runs", type=positive, default=15)
    parser.add_argument(
        "--seconds", type=float, default=1.5, help="how long decode steps are timed beside each transfer"
    )
    parser.add_argument("--prompts", type=positive, default=5, help="so many are fetched as they are computed")
    add_json(parser)
    parser.add_argument("--give", metavar="TLS_FOLDER", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        model = checkpoint(args.model)
        if args.give:
            files = certificates.PeerFiles(
                *(args.give / name for name in ("ca.crt", "tls.crt", "tls.key", "admin.crt", "admin.key"))
            )
            tls = ServerTls(tls_certificate=files.certificate, tls_key=files.key, tls_client_ca=files.ca)
            asyncio.run(migrate(model, args.mib, tls))
            return 0
        length = Length(args.runs, args.seconds, args.prompts)
        result = report(args.mib, asyncio.run(measure(model, args.mib, length, Console(stderr=True))))
    except (FileNotFoundError, InvalidConfig) as error:
        print(error, file=sys.stderr)
        return 1
    write_result(result, args.json, lambda: show(result, Console()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
