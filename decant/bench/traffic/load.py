"""Open loop: requests are sent at their times. Closed loop: a client sends its next when its last has ended.

A client of a closed loop stops after `LOST_IN_A_ROW` requests in a row that reached no router.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc

from decant.bench.records import Record
from decant.bench.traffic.workload import BenchRequest
from decant.client.async_client import AsyncClient
from decant.runtime.error_details import Reason
from decant.runtime.errors import ServiceError

LOST = grpc.StatusCode.UNAVAILABLE.name
"""Code of a request that ended without a reason of the service."""
LOST_IN_A_ROW = 3

Notify = Callable[[Record], None]


class Load:
    def __init__(self, client: AsyncClient, model: str, timeout: float, notify: Notify) -> None:
        self._client = client
        self._model = model
        self._timeout = timeout
        self._notify = notify

    async def open(self, requests: Sequence[BenchRequest], arrivals: Sequence[float]) -> list[Record]:
        """Send requests at `arrivals`, in seconds from now."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, arrival in sorted(zip(requests, arrivals, strict=True), key=lambda pair: pair[1]):
                await asyncio.sleep(began + arrival - time.monotonic())
                tasks.append(group.create_task(self._converse(request, began + arrival)))
        return [record for task in tasks for record in task.result()]

    async def closed(self, requests: Sequence[BenchRequest], clients: int) -> list[Record]:
        waiting = iter(requests)

        async def client() -> list[Record]:
            records: list[Record] = []
            for request in waiting:
                records += await self._converse(request, time.monotonic())
                if [one.error for one in records[-LOST_IN_A_ROW:]] == [LOST] * LOST_IN_A_ROW:
                    break
            return records

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(client()) for _ in range(min(clients, len(requests)))]
        return [record for task in tasks for record in task.result()]

    async def _converse(self, request: BenchRequest, due: float) -> list[Record]:
        records = [await self._send(request, due)]
        for follow_up in request.follow_ups:
            if records[-1].error:
                break
            records.append(await self._send(follow_up, time.monotonic()))
        return records

    async def _send(self, request: BenchRequest, due: float) -> Record:
        record = Record(due, time.monotonic())
        stream = self._client.stream(
            request.prompt,
            timeout=self._timeout,
            model=self._model or None,
            max_tokens=request.output_len,
            ignore_eos=True,
        )
        try:
            async with stream:
                async for delta in stream:
                    record.tokens += [time.monotonic()] * delta.num_tokens
        except ServiceError as error:
            has_reason = error.reason is not Reason.UNSPECIFIED
            record.error = error.reason.value if has_reason else error.code.name
        if not record.error and (len(record.tokens) != request.output_len or stream.receipt is None):
            record.error = f"{len(record.tokens)} of {request.output_len} tokens"
        record.receipt = None if record.error else stream.receipt
        if stream.usage is not None:
            record.prompt_tokens = stream.usage.prompt_tokens
            record.cached_tokens = stream.usage.cached_prompt_tokens or 0
        self._notify(record)
        return record
