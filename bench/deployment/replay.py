"""Clients that send a workload's requests in their own process: ``python -m bench.deployment.replay``.

parent                                   here
  a Replay, one JSON object ── stdin ──> connects, sends one short request
  {"ready": 8124}           <── stdout ──    connected; its process id
  any line                  ── stdin ──> sends every request at its time
  {"served": [...]}         <── stdout ──
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.workloads import Item
from decant.client.async_client import AsyncClient
from decant.runtime.serving.server import freeze_gc

WARM_UP = Item("warm-up", list(range(96)), 4, 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    address: str
    items: Sequence[Item]

    @classmethod
    def from_json(cls, text: str) -> Replay:
        raw = json.loads(text)
        return cls(raw["address"], [Item(*item) for item in raw["items"]])


@dataclass(slots=True)
class Answer:
    id: str
    input_len: int
    sent: float
    tokens: list[float]
    messages: int = 0


async def serve(client: AsyncClient, items: Sequence[Item]) -> list[Answer]:
    began = time.perf_counter()
    answers = await asyncio.gather(*[_serve(client, item, began) for item in items])
    for item, answer in zip(items, answers, strict=True):
        if len(answer.tokens) != item.output_len:
            raise RuntimeError(f"{item.id}: {len(answer.tokens)} tokens, {item.output_len} were asked for")
    return answers


async def _serve(client: AsyncClient, item: Item, began: float) -> Answer:
    await asyncio.sleep(item.arrival_s - (time.perf_counter() - began))
    answer = Answer(item.id, len(item.prompt_token_ids), item.arrival_s, [])
    stream = client.stream(item.prompt_token_ids, max_tokens=item.output_len, ignore_eos=True, temperature=0)
    async with stream:
        async for delta in stream:
            answer.tokens += [time.perf_counter() - began] * delta.num_tokens
            answer.messages += 1
    return answer


async def run(replay: Replay) -> None:
    def send(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    async with AsyncClient(replay.address) as client:
        await serve(client, [WARM_UP])
        freeze_gc()
        send({"ready": os.getpid()})
        await asyncio.to_thread(sys.stdin.readline)
        answers = await serve(client, replay.items)
    send({"served": [asdict(answer) for answer in answers]})


if __name__ == "__main__":
    asyncio.run(run(Replay.from_json(sys.stdin.readline())))
