"""A cache on its way between two processes, beside a bare gRPC stream of bytes between the same two.

    python -m bench.handoff [--mib 128] [--runs 15] [--json OUT]

The giver is a process of its own with blocks of the size that Qwen2.5-0.5B has (192 KiB for 16 tokens); its prompt is
computed before the clock starts, so that what is measured is the moving: reading blocks, sums, messages, checks,
writing blocks, seal. The bare stream sends messages of the same size and does nothing with them. The two take turns.

Then one end after the other computes steps of many small operations, alone, beside bare streams, and beside handoffs:
how much longer a step takes. On less than four free cores the bare stream slows steps down as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
from rich.console import Console
from rich.progress import track

from bench.bulk import LAYOUT, End, Span
from handoff.packing import MESSAGE_BYTES
from handoff.service import KvSourceService
from handoff.transport import GrpcTransport
from protos import worker_pb2 as wire

GOAL = 0.8
"""Share of the bare stream's rate that a handoff should reach."""
STEP_GOAL = 1.2
"""How many times as long a step beside a handoff may take as one alone."""
STEP_SECONDS = 1.5
"""How long steps are watched in each company."""
ENDS = ("giver", "taker")


# -- the giver's process -----------------------------------------------------------------------------------------


async def give(mib: int) -> None:
    """Serve until standard input closes; the first line says the port."""
    end = End("giver", mib)

    async def offer(request: bytes, _: Any) -> bytes:
        name = request.decode()
        ticket = wire.Ticket(run=wire.Run(request=name, epoch=1, attempt=1), giver=end.peer, layout=LAYOUT)
        end.giver.issue(ticket, name, end.tokens)
        await end.loop.call(lambda engine: engine.add(end.request(name, park=True)))
        await end.happened(name)
        return ticket.SerializeToString()

    async def bare(request: bytes, _: Any) -> AsyncIterator[bytes]:
        message = bytes(MESSAGE_BYTES)
        for _index in range(mib):
            yield message

    async def busy(request: bytes, _: Any) -> bytes:
        await end.busy()
        return b""

    async def rest(request: bytes, _: Any) -> bytes:
        return json.dumps(await end.rest()).encode()

    server = grpc.aio.server()
    KvSourceService(end.giver).add_to(server)
    methods: dict[str, Any] = {
        "Bare": grpc.unary_stream_rpc_method_handler(bare),
        **{call.__name__: grpc.unary_unary_rpc_method_handler(call) for call in (offer, busy, rest)},
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bench", methods),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await end.loop.stop()


# -- the taker's process -----------------------------------------------------------------------------------------


def connect(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, [("grpc.max_receive_message_length", 4 * MESSAGE_BYTES)])


class Pair:
    """A taker here and the giver at ``address``."""

    def __init__(self, address: str, mib: int) -> None:
        self.end = End("taker", mib)
        self._address = address
        self._channel = connect(address)
        self._transport = GrpcTransport(connect)
        self._moved = 0

    async def call(self, method: str, request: bytes = b"") -> bytes:
        """Ask the giver's process."""
        ask: Any = self._channel.unary_unary(f"/bench.Bench/{method}")
        answer: bytes = await ask(request)
        return answer

    async def bare(self) -> Span:
        """Receive as many bytes as a handoff moves."""
        began, received = time.monotonic(), 0
        stream: Any = self._channel.unary_stream("/bench.Bench/Bare")
        async for message in stream(b""):
            received += len(message)
        return Span(began, time.monotonic())

    async def handoff(self) -> Span:
        """From the fetch to a joined sequence."""
        self._moved += 1
        name = f"run-{self._moved}"
        ticket = wire.Ticket.FromString(await self.call("offer", name.encode()))
        arrival = await self.end.loop.call(lambda engine: engine.reserve(self.end.request(name, park=False)))
        began = time.monotonic()
        await self.end.taker.take(self._transport.source(self._address), ticket, arrival)
        took = Span(began, time.monotonic())
        await self.end.happened(name)
        return took

    async def close(self) -> None:
        await self._channel.close()
        await self._transport.close()
        await self.end.loop.stop()
        self.end.engine.check_integrity()


Moves = dict[str, Callable[[], Awaitable[Span]]]


async def measure(mib: int, runs: int, console: Console) -> dict[str, Any]:
    """Seconds of both, in turn, after one round to warm up; then the steps of either end."""
    command = [sys.executable, "-m", "bench.handoff", "--give", "--mib", str(mib)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pair = Pair(f"127.0.0.1:{int(await process.stdout.readline())}", mib)
        moves: Moves = {"bare": pair.bare, "handoff": pair.handoff}
        taken: dict[str, list[float]] = {name: [] for name in moves}
        for _ in track(range(runs + 1), "moving", console=console, transient=True):
            for name, move in moves.items():
                span = await move()
                taken[name].append(span.ended - span.began)
        figures: dict[str, Any] = {f"{name}_s": seconds[1:] for name, seconds in taken.items()}
        steppers: list[Stepper] = [GiverSteps(pair), pair.end]
        for stepper in track(steppers, "stepping", console=console, transient=True):
            figures[f"{stepper.peer.id}_step_ms"] = await watch_steps(stepper, moves)
        await pair.close()
    finally:
        process.stdin.close()
        await process.wait()
    return figures


class Stepper(Protocol):
    """An end that can be told to step."""

    peer: wire.Peer

    async def busy(self) -> None: ...
    async def rest(self) -> list[Span]: ...


class GiverSteps:
    """The giver's, in its own process."""

    peer = wire.Peer(id="giver")

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    async def busy(self) -> None:
        await self._pair.call("busy")

    async def rest(self) -> list[Span]:
        return [Span(*step) for step in json.loads(await self._pair.call("rest"))]


async def watch_steps(stepper: Stepper, moves: Moves) -> dict[str, float]:
    """Milliseconds of a median step: alone, and beside each of ``moves``."""

    async def nothing() -> Span:
        began = time.monotonic()
        await asyncio.sleep(STEP_SECONDS)
        return Span(began, time.monotonic())

    await stepper.busy()
    beside: dict[str, list[Span]] = {}
    for name, move in {"alone": nothing, **moves}.items():
        until, beside[name] = time.monotonic() + STEP_SECONDS, []
        while time.monotonic() < until:
            beside[name].append(await move())
    steps = await stepper.rest()
    return {name: 1e3 * statistics.median(_within(steps, spans)) for name, spans in beside.items()}


def _within(steps: list[Span], spans: list[Span]) -> list[float]:
    """Seconds of the steps that lie in one of the spans."""
    return [
        step.ended - step.began
        for step in steps
        if any(span.began <= step.began and step.ended <= span.ended for span in spans)
    ]


def report(mib: int, figures: dict[str, Any]) -> dict[str, Any]:
    """The figures, and what they come to; a ratio is the median over pairs, its spread their quartiles."""
    ratios = [bare / handoff for bare, handoff in zip(figures["bare_s"], figures["handoff_s"], strict=True)]
    slower = {end: figures[f"{end}_step_ms"]["handoff"] / figures[f"{end}_step_ms"]["alone"] for end in ENDS}
    return {
        "mib": mib,
        **figures,
        "mib_per_s": {name: mib / statistics.median(figures[f"{name}_s"]) for name in ("bare", "handoff")},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2] if len(ratios) > 1 else ratios * 2,
        "goal": GOAL,
        "step_slower": slower,
        "step_goal": STEP_GOAL,
    }


def show(result: dict[str, Any], console: Console) -> None:
    """Print it for people."""
    rates, (low, high) = result["mib_per_s"], result["ratio_quartiles"]
    console.print(
        f"bare stream {rates['bare']:.0f} MiB/s, handoff {rates['handoff']:.0f} MiB/s: "
        f"{result['ratio']:.0%} of it, quartiles {low:.0%} and {high:.0%} (goal {GOAL:.0%})"
    )
    for end in ENDS:
        step = result[f"{end}_step_ms"]
        console.print(
            f"a step of the {end}: {step['alone']:.1f} ms alone, {step['bare']:.1f} beside a bare stream, "
            f"{step['handoff']:.1f} beside a handoff: {result['step_slower'][end]:.2f} times (goal {STEP_GOAL})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the cache")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", metavar="OUT", help="write the figures there; - for standard output")
    parser.add_argument("--give", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.give:
        asyncio.run(give(args.mib))
        return
    result = report(args.mib, asyncio.run(measure(args.mib, args.runs, Console(stderr=True))))
    if args.json == "-":
        json.dump(result, sys.stdout, indent=2)
        return
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    show(result, Console())


if __name__ == "__main__":
    main()
