"""A load that turns from long prompts to long answers, on two workers of each role, with fixed pools and balanced ones.

    python -m bench.pools --seconds 90                    engines that only take time
    python -m bench.pools --seconds 35 --cores 0.2        models/tiny-python, each worker with 0.2 of a core; needs root

Router, workers and Redis are processes of their own. Engines that only take time get the rates of PHASES; real ones get
OVERLOAD times the rate that the fixed pools reach with BURST requests at once. A request is in time if its first token
comes within --ttft seconds, and each further one within --tpot on average.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from bench.deployment.cpu_share import add, cpu_share
from bench.deployment.processes import READY_SECONDS, module_process, registered, router_address, serving
from decant import models
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.runtime.grpc_options import NO_PROXY
from decant.state.private_redis import PrivateRedis

MODEL = "m"
KV_BYTES = str(256 << 20)
WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")


@dataclass(frozen=True)
class Phase:
    name: str
    rate: float
    prompt_tokens: int
    output_tokens: int


PHASES = (Phase("long prompts", 4.0, 1200, 10), Phase("long answers", 2.5, 100, 300))


@dataclass
class Outcome:
    phase: str
    ttft: float = float("inf")
    tpot: float = float("inf")
    error: str = ""


OVERLOAD = 1.3
"""Load of the fixed pool in each phase; with a third worker of the four it is 0.87."""
BURST = 64


async def run(options: argparse.Namespace, folder: Path) -> None:
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(PrivateRedis())
        shared = ("--redis-url", redis.url, "--port", "0", "--log-format", "json")
        for id in WORKERS:
            await start_worker(stack, id, options.cores, shared, folder / f"{id}.log")
        async with asyncio.timeout(READY_SECONDS):
            await registered(redis.url, len(WORKERS))
        phases: Sequence[Phase] = PHASES
        for is_balanced in (False, True):
            log = folder / f"router-{is_balanced}.log"
            async with router(redis.url, shared, log, is_balanced=is_balanced) as address:
                if options.cores is not None and not is_balanced:
                    phases = [replace(phase, rate=OVERLOAD * await capacity(address, phase)) for phase in PHASES]
                outcomes = await offer(address, phases, options.seconds)
            rates = {phase.name: round(phase.rate, 2) for phase in phases}
            results = {"balanced": is_balanced, "rates": rates, **summary(outcomes, options.ttft, options.tpot)}
            print(json.dumps({**results, "moves": moves(log)}), flush=True)


async def start_worker(stack: AsyncExitStack, id: str, cores: float | None, shared: Sequence[str], log: Path) -> None:
    role, own = id.partition("-")[0], ["--model", str(models.path()), "--model-id", MODEL, "--id", id]
    own += ["--token-budget", "256", "--max-running", "32", *shared]
    if cores is None:
        await stack.enter_async_context(module_process(["bench.deployment.sized_worker", role, *own], log))
        return
    group = stack.enter_context(cpu_share(id, cores))
    command = [f"decant.{role}_worker", "--threads", "1", "--kv-bytes", KV_BYTES, *own]
    add(group, (await stack.enter_async_context(module_process(command, log))).pid)


@asynccontextmanager
async def router(url: str, shared: Sequence[str], log: Path, *, is_balanced: bool) -> AsyncIterator[str]:
    command = ["router", "--models", f"{MODEL}={models.path()}", "--handoff-min-tokens", "0", *shared]
    async with module_process([*command, *(["--balance-pools"] if is_balanced else [])], log):
        async with asyncio.timeout(READY_SECONDS):
            address = await router_address(url)
            await serving(address)
        yield address


def moves(log: Path) -> list[dict[str, Any]]:
    """What the router's log has of the workers and sequences that it moved."""
    events = ("worker changes pools", "sequences leave a crowded worker")
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    keys = ("event", "worker", "role", "sequences")
    return [{key: line[key] for key in keys if key in line} for line in lines if line["event"] in events]


async def capacity(address: str, phase: Phase) -> float:
    """Requests per second that end while BURST of them are there at first."""
    draw, outcomes = random.Random(2), [Outcome(phase.name) for _ in range(BURST)]
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address, NO_PROXY) as channel, asyncio.TaskGroup() as tasks:
        for outcome in outcomes:
            tasks.create_task(send(services.InferenceServiceStub(channel), phase, draw, outcome))
    if errors := [outcome.error for outcome in outcomes if outcome.error]:
        raise RuntimeError(f"{phase.name}: {errors[0]}")
    return BURST / (time.monotonic() - began)


async def offer(address: str, phases: Sequence[Phase], seconds: float) -> list[Outcome]:
    draw, outcomes = random.Random(1), list[Outcome]()
    async with grpc.aio.insecure_channel(address, NO_PROXY) as channel, asyncio.TaskGroup() as tasks:
        stub = services.InferenceServiceStub(channel)
        for phase in phases:
            due = time.monotonic()
            until = due + seconds
            while (due := due + draw.expovariate(phase.rate)) < until:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                outcomes.append(Outcome(phase.name))
                tasks.create_task(send(stub, phase, draw, outcomes[-1]))
    return outcomes


async def send(stub: services.InferenceServiceStub, phase: Phase, draw: random.Random, outcome: Outcome) -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[draw.randint(2, 1000) for _ in range(phase.prompt_tokens)]),
        stopping=pb.StoppingParams(max_tokens=phase.output_tokens, ignore_eos=True),
        response=pb.ResponseOptions(text=False),
    )
    began, first, last = time.monotonic(), 0.0, 0.0
    try:
        async for message in stub.GenerateStream(request):
            if message.HasField("delta"):
                last = time.monotonic()
                first = first or last
    except grpc.aio.AioRpcError as error:
        outcome.error = error.code().name
        return
    outcome.ttft, outcome.tpot = first - began, (last - first) / (phase.output_tokens - 1)


def summary(outcomes: Sequence[Outcome], ttft: float, tpot: float) -> dict[str, Any]:
    rows = {}
    for phase in PHASES:
        seen = [one for one in outcomes if one.phase == phase.name]
        in_time = sum(one.ttft <= ttft and one.tpot <= tpot for one in seen)
        firsts, means = sorted(one.ttft for one in seen), sorted(one.tpot for one in seen)
        rows[phase.name] = {
            "requests": len(seen),
            "failed": sum(bool(one.error) for one in seen),
            "in_time": round(in_time / len(seen), 3),
            "ttft_p50_s": round(firsts[len(seen) // 2], 2),
            "ttft_p95_s": round(firsts[len(seen) * 95 // 100], 2),
            "tpot_p95_s": round(means[len(seen) * 95 // 100], 3),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="duration of each phase")
    parser.add_argument("--ttft", type=float, default=3.0, help="seconds until the first token")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds per further token")
    parser.add_argument("--cores", type=float, help="real engines, each with this share of a core; unset: timed ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options, Path(folder)))


if __name__ == "__main__":
    main()
