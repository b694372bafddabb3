"""A cache on its way between two processes, beside a bare gRPC stream of bytes between the same two.

    python -m bench.handoff [--mib 128] [--runs 5] [--json OUT]

The giver is a process of its own with blocks of the size that Qwen2.5-0.5B has (192 KiB for 16 tokens); its prompt is
computed before the clock starts, so that what is measured is the moving: reading blocks, sums, messages, checks,
writing blocks, acknowledgements, seal. The bare stream sends messages of the same size and does nothing with them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track

from engine.engine import Engine
from engine.loop import EngineLoop
from engine.output import StepOutput
from engine.plan import StepPlan, StepResult
from engine.request import Request, StopParams
from engine.scheduler import Limits
from handoff.giver import Giver
from handoff.packing import MESSAGE_BYTES, Shape, checksum
from handoff.service import KvSourceService
from handoff.taker import Taker
from handoff.transport import GrpcTransport
from protos import worker_pb2 as wire
from protos import worker_pb2_grpc as services

BLOCK_SIZE = 16
BLOCK_BYTES = BLOCK_SIZE * 12 * 1024
LAYOUT = 1
GOAL = 0.8
"""Share of the bare stream's rate that a handoff should reach."""


class Bulk:
    """A device of blocks of real bytes that computes nothing."""

    block_size = BLOCK_SIZE
    block_bytes = BLOCK_BYTES
    vocab_size = 256
    eos_token_ids: frozenset[int] = frozenset()
    layout = "bulk"

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.window = num_blocks * BLOCK_SIZE
        self._bytes = memoryview(bytearray(num_blocks * BLOCK_BYTES))
        for block in range(num_blocks):
            self.read(block)[:4] = block.to_bytes(4, "little")

    def read(self, block: int) -> memoryview:
        return self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]

    def write(self, block: int, data: bytes | bytearray | memoryview) -> None:
        self.read(block)[:] = data

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult([7 if row.sample else None for row in plan.rows])


class End:
    """One side: an engine over bulk blocks on its thread, with both ends of a handoff."""

    def __init__(self, name: str, mib: int) -> None:
        self.tokens = mib * (1 << 20) // (12 * 1024)
        device = Bulk(self.tokens // BLOCK_SIZE + 8)
        limits = Limits(token_budget=device.window, max_running=4, window=device.window)
        self.engine = Engine(device, limits, checksum=checksum)
        self.peer = wire.Peer(id=name, incarnation=1, protocol=1)
        shape = Shape(BLOCK_SIZE, BLOCK_BYTES, LAYOUT)
        self.loop = EngineLoop(self.engine, self._on_step)
        self.giver = Giver(self.loop, shape, wire.Beat)
        self.taker = Taker(self.loop, shape, self.peer, wire.Beat)
        self._events: dict[str, asyncio.Event] = {}
        self.loop.start()

    def _on_step(self, output: StepOutput) -> None:
        self.giver.on_step(output)
        for name in (*output.parked, *(ended.id for ended in output.ended)):
            self._events.setdefault(name, asyncio.Event()).set()

    async def happened(self, name: str) -> None:
        """The sequence was parked or ended."""
        await self._events.setdefault(name, asyncio.Event()).wait()

    def request(self, name: str, park: bool) -> Request:
        """A prompt that no cache knows: its first tokens are its name."""
        tokens = (*name.encode(), *array("B", bytes(self.tokens - len(name))))
        stop = StopParams(max_tokens=2, ignore_eos=True)
        return Request(name, tokens, stop=stop, use_prefix_cache=False, park_after=1 if park else None)


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

    server = grpc.aio.server()
    KvSourceService(end.giver).add_to(server)
    methods: dict[str, Any] = {
        "Offer": grpc.unary_unary_rpc_method_handler(offer),
        "Bare": grpc.unary_stream_rpc_method_handler(bare),
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


async def measure(mib: int, runs: int, console: Console) -> dict[str, Any]:
    """Seconds of both, in turn; the first round is the warm-up."""
    command = [sys.executable, "-m", "bench.handoff", "--give", "--mib", str(mib)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert process.stdin is not None
    assert process.stdout is not None
    transport = GrpcTransport(connect)
    try:
        address = f"127.0.0.1:{int(await process.stdout.readline())}"
        end, channel = End("taker", mib), connect(address)
        bare, handed = [], []
        for index in track(range(runs + 1), "moving", console=console, transient=True):
            bare.append(await bare_stream(channel))
            handed.append(await hand_over(end, channel, transport, address, f"run-{index}"))
        await channel.close()
        await end.loop.stop()
        end.engine.check_integrity()
    finally:
        await transport.close()
        process.stdin.close()
        await process.wait()
    return {"bare_s": bare[1:], "handoff_s": handed[1:]}


async def bare_stream(channel: grpc.aio.Channel) -> float:
    began, received = time.perf_counter(), 0
    stream: Any = channel.unary_stream("/bench.Bench/Bare")
    async for message in stream(b""):
        received += len(message)
    return time.perf_counter() - began


async def hand_over(end: End, channel: grpc.aio.Channel, transport: GrpcTransport, address: str, name: str) -> float:
    """Seconds from the fetch to a joined sequence."""
    offer: Any = channel.unary_unary("/bench.Bench/Offer")
    ticket = wire.Ticket.FromString(await offer(name.encode()))
    arrival = await end.loop.call(lambda engine: engine.reserve(end.request(name, park=False)))
    began = time.perf_counter()
    await end.taker.take(transport.source(address), ticket, arrival)
    took = time.perf_counter() - began
    await end.happened(name)
    return took


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handoff", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="size of the cache")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="OUT", help="write the figures there; - for standard output")
    parser.add_argument("--give", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.give:
        asyncio.run(give(args.mib))
        return
    figures = asyncio.run(measure(args.mib, args.runs, Console(stderr=True)))
    rates = {name: args.mib / statistics.median(figures[f"{name}_s"]) for name in ("bare", "handoff")}
    report = {"mib": args.mib, **figures, "mib_per_s": rates, "ratio": rates["handoff"] / rates["bare"], "goal": GOAL}
    if args.json == "-":
        json.dump(report, sys.stdout, indent=2)
        return
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
    Console().print(
        f"bare stream {rates['bare']:.0f} MiB/s, handoff {rates['handoff']:.0f} MiB/s: "
        f"{report['ratio']:.0%} (goal {GOAL:.0%})"
    )


if __name__ == "__main__":
    main()
