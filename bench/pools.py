"""A load that turns from long prompts to long answers, on two workers of each role, with fixed pools and balanced ones.

    python -m bench.pools --seconds 90

Router, workers and Redis are processes of their own. The engines only take time, so that four fit on two cores. A
request is in time if its first token comes within --ttft seconds, and each further one within --tpot on average.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.deployment.processes import READY_SECONDS, module_process, registered, router_address, serving
from decant import models
from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.runtime.grpc_options import NO_PROXY
from decant.state.private_redis import PrivateRedis

MODEL = "m"
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


async def measure(seconds: float, *, is_balanced: bool, folder: Path) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Return the outcomes of all requests, and the moves that the router's log has."""
    async with AsyncExitStack() as stack:
        redis = await stack.enter_async_context(PrivateRedis())
        shared = ["--redis-url", redis.url, "--port", "0", "--log-format", "json"]
        for id in WORKERS:
            command = ["bench.deployment.sized_worker", id.partition("-")[0], "--model", str(models.path())]
            command += ["--model-id", MODEL, "--id", id, "--token-budget", "256", "--max-running", "32", *shared]
            await stack.enter_async_context(module_process(command, folder / f"{id}.log"))
        command = ["router", "--models", f"{MODEL}={models.path()}", "--handoff-min-tokens", "0", *shared]
        command += ["--balance-pools"] if is_balanced else []
        async with asyncio.timeout(READY_SECONDS):
            await registered(redis.url, len(WORKERS))
            await stack.enter_async_context(module_process(command, folder / "router.log"))
            address = await router_address(redis.url)
            await serving(address)
        outcomes = await offer(address, seconds)
    lines = [json.loads(line) for line in (folder / "router.log").read_text().splitlines() if line.startswith("{")]
    events = ("worker changes pools", "sequences leave a crowded worker")
    return outcomes, [line for line in lines if line["event"] in events]


async def offer(address: str, seconds: float) -> list[Outcome]:
    draw, outcomes = random.Random(1), list[Outcome]()
    async with grpc.aio.insecure_channel(address, NO_PROXY) as channel, asyncio.TaskGroup() as tasks:
        stub = services.InferenceServiceStub(channel)
        for phase in PHASES:
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
    options = parser.parse_args()
    for is_balanced in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            outcomes, moves = asyncio.run(measure(options.seconds, is_balanced=is_balanced, folder=Path(folder)))
        moved = [{key: line[key] for key in ("event", "worker", "role", "sequences") if key in line} for line in moves]
        print(json.dumps({"balanced": is_balanced, **summary(outcomes, options.ttft, options.tpot), "moves": moved}))


if __name__ == "__main__":
    main()
