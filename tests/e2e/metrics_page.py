from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Callable

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.deployment import PATIENCE_S

Totals = dict[str, float]
"""By metric name: the sum of its series; of a histogram, the number of observations."""


def read_page(port: int | None, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENCE_S) as response:
        text: str = response.read().decode()
        return text


def read_totals(port: int | None) -> Totals:
    return totals_of(read_page(port, "/metrics"))


def totals_of(text: str) -> Totals:
    totals: Totals = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        counted = f"{name}_count" if family.type == "histogram" else name
        totals[name] = sum(sample.value for sample in family.samples if sample.name == counted)
    return totals


async def until_metric(port: int | None, name: str, holds: Callable[[float], bool]) -> Totals:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            totals = await asyncio.to_thread(read_totals, port)
            if holds(totals[name]):
                return totals
            await asyncio.sleep(0.02)
