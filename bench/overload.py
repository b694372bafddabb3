"""Sends requests at a constant rate, whatever becomes of them, and counts what a deployment completes and refuses.

    python -m bench.overload 127.0.0.1:50051 --rate 100 --seconds 30

Calls are not repeated, unlike those of a client, so that the offered rate is the rate given. Prompts are random.
``steady_per_s`` counts the requests that completed in the last two thirds of the offer: the queue is full by then, and
the last answers, which end beside ever fewer others, are left out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc

from decant.protos import inference_pb2 as pb
from decant.protos import inference_pb2_grpc as services
from decant.runtime.connections.channel import open_channel
from decant.runtime.connections.tls import PeerTls
from decant.runtime.errors import from_call

COMPLETED = "completed"
REFUSED = "QUEUE_FULL"
CHANNELS = 8
TOKEN_IDS = range(300, 2000)


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    first_token_s: float | None
    ended: float


async def send(stub: Any, options: argparse.Namespace, draw: random.Random) -> Outcome:
    ids = draw.choices(TOKEN_IDS, k=draw.randint(*options.prompt_tokens))
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=ids), stopping=pb.StoppingParams(max_tokens=options.output_tokens, ignore_eos=True)
    )
    began, first, name = time.monotonic(), None, COMPLETED
    try:
        async for message in stub.GenerateStream(request, timeout=options.timeout):
            if not message.HasField("waiting"):
                first = first or time.monotonic() - began
    except grpc.aio.AioRpcError as error:
        name = from_call(error).reason.value
    ended = time.monotonic()
    return Outcome(name, ended - began, first, ended)


async def offer(options: argparse.Namespace) -> dict[str, Any]:
    draw, tasks, outcomes = random.Random(options.seed), set[asyncio.Task[Outcome]](), list[Outcome]()
    channels = [open_channel(options.address, PeerTls()) for _ in range(CHANNELS)]
    stubs = [services.InferenceServiceStub(channel) for channel in channels]
    began = due = time.monotonic()
    while due - began < options.seconds:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        task = asyncio.create_task(send(draw.choice(stubs), options, draw))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda ended: outcomes.append(ended.result()))
        due += draw.expovariate(options.rate)
    while tasks:
        await asyncio.wait(tasks)
    duration = time.monotonic() - began
    for channel in channels:
        await channel.close()
    steady = [
        one for one in outcomes if one.name == COMPLETED and options.seconds / 3 < one.ended - began < options.seconds
    ]
    figures = {"rate": options.rate, "duration_s": round(duration, 1)}
    figures["steady_per_s"] = round(len(steady) / (options.seconds * 2 / 3), 1)
    return figures | summary(outcomes, duration)


def summary(outcomes: list[Outcome], duration: float) -> dict[str, Any]:
    counts = Counter(outcome.name for outcome in outcomes)
    accepted = len(outcomes) - counts[REFUSED]
    completed = [outcome for outcome in outcomes if outcome.name == COMPLETED]
    refused = [outcome.seconds for outcome in outcomes if outcome.name == REFUSED]
    return {
        "outcomes": dict(counts),
        "completed_per_s": round(len(completed) / duration, 1),
        "accepted_and_failed": round(1 - len(completed) / accepted, 4) if accepted else 0.0,
        "refusal_s": percentiles(refused),
        "ttft_s": percentiles([outcome.first_token_s for outcome in completed if outcome.first_token_s]),
        "e2e_s": percentiles([outcome.seconds for outcome in completed]),
    }


def percentiles(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {f"p{p}": round(values[len(values) * p // 100], 3) for p in (50, 99)} if values else {}


def _tokens(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--timeout", type=float, default=30.0, help="deadline of a request, in seconds")
    parser.add_argument("--prompt-tokens", type=_tokens, default=(100, 200))
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=None)
    print(json.dumps(asyncio.run(offer(parser.parse_args()))))


if __name__ == "__main__":
    main()
